"""Word lists of the synthetic documents, written by hand; simple words only."""

# Long lists read better as text.
# ruff: noqa: SIM905

from __future__ import annotations

WOMEN = """Ada Alice Alma Amina Anna Bella Celia Clara Cora Daria Dora Edith Ella Emma Esther Fay
Fiona Freya Gita Gloria Grace Greta Hana Helen Ida Inga Iris Ivy Jane Joan Julia June Karen Katya
Kira Laura Leila Lena Lily Lucy Mara Marta Maya Mia Mina Mira Nadia Nina Nora Olga Paula Petra Pia
Rosa Ruth Sara Sofia Stella Tara Tess Uma Ursula Vera Vivian Wanda Willa
Xena Yara Zara Zoe""".split()
MEN = """Abel Adam Amir Ben Bob Boris Bruno Carl Cyrus Dan David Dmitri Elias Emil Eric Felix Finn
Frank Georg Gus Harold Henry Hugo Igor Isaac Ivan Jack James Jonas Karl Kenji Kurt Leo Lucas Marco
Max Milo Nils Noah Omar Oscar Otto Owen Paul Peter Quinn Rahul Ralph Robert Sam Simon Tariq Ted
Theo Thomas Tim Tom Victor Viktor Walter Will Yuri Yusuf Zack""".split()
SURNAMES = """Archer Baker Bishop Brook Carter Clark Cole Cook Cross Dale Dean Field Fisher Ford
Frost Gray Hall Hart Hill Hunter King Lake Lane Marsh Mason Moss Nash North Park Pond Reed Rice
Rose Sharp Smith Snow Stone Swift Turner Vale Wade Ward Wells West White Wolf Wood Young""".split()
SYLLABLES = "ba bel da dor el fa gan hal in ka lin lo mar na nor or pel ra sil ta tor ul va wen zel"

JOBS = """baker farmer tailor fisherman teacher shepherd carpenter gardener miller blacksmith weaver
hunter painter shoemaker sailor potter doctor cook driver singer writer beekeeper""".split()
ANIMALS = """fox owl rabbit bear wolf crow horse goat frog mouse cat dog deer turtle goose squirrel
duck hen pig sheep badger otter hedgehog swan donkey""".split()
PLACES = """village|small town|quiet valley|house by the river|cottage on the hill|fishing village|
farm near the forest|castle|mill beside the stream|tower at the edge of the woods|city by the sea|
hut in the mountains|inn at the crossroads|house with a red door|harbor town|little street
""".replace("\n", "").split("|")  # fmt: skip
WILDS = """forest mountain river lake valley meadow cave garden beach desert bridge swamp hill
market harbor orchard field island""".split()
OBJECTS = """golden key|silver bell|red lantern|wooden flute|blue stone|old map|small mirror|
brass ring|glass bottle|painted box|warm coat|white feather|strong rope|copper lamp|green hat|
round drum|little boat|magic seed|heavy book|soft blanket|iron nail|clay cup|paper kite|
leather bag|wool scarf|wooden spoon|bright coin|black umbrella|music box|straw basket
""".replace("\n", "").split("|")  # fmt: skip
TRAITS = """kind brave clever quiet cheerful patient honest gentle stubborn curious careful lonely
young tired proud shy busy poor lucky wise funny lazy""".split()
FOODS = "bread honey apples soup cheese nuts berries cake milk pears rice beans eggs plums".split()
WEATHER = """The sun was warm|It was a cold morning|The rain fell softly|The wind blew hard|
The sky was clear|Snow covered the ground|A thick fog lay over the fields|The leaves were red|
The air smelled of grass|The moon was bright|It was the first day of spring|The night was long
""".replace("\n", "").split("|")  # fmt: skip
GLAD = "happy glad proud thankful calm cheerful pleased".split()
SAD = "sad worried afraid ashamed angry lonely tired".split()
KIN = "mother father grandmother grandfather brother sister friend uncle aunt neighbor".split()
COLORS = "red blue green yellow black white brown grey orange pink".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()
CITIES = """Paris London Rome Oslo Cairo Lima Delhi Tokyo Berlin Madrid Vienna Boston Dublin Prague
Athens Lisbon Geneva Milan Warsaw Bergen""".split()
