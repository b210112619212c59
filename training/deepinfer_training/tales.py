"""Short tales from a small grammar: one hero, one wish, one obstacle, one helper, one ending."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deepinfer_training import vocabulary as words


@dataclass(frozen=True, slots=True)
class _Cast:
    """Everything a tale keeps from its first to its last sentence."""

    hero: str
    he: str
    his: str
    him: str
    job: str
    trait: str
    place: str
    wild: str
    thing: str
    animal: str
    animal_trait: str
    friend: str
    friend_job: str
    kin: str
    food: str
    weather: str
    glad: str
    sad: str

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


def _cast(rng: random.Random) -> _Cast:
    woman = rng.random() < 0.5
    hero = rng.choice(words.WOMEN if woman else words.MEN)
    friend = rng.choice([name for name in words.WOMEN + words.MEN if name != hero])
    pronouns = ("she", "her", "her") if woman else ("he", "his", "him")
    return _Cast(
        hero, *pronouns,
        job=rng.choice(words.JOBS), trait=rng.choice(words.TRAITS),
        place=rng.choice(words.PLACES), wild=rng.choice(words.WILDS),
        thing=rng.choice(words.OBJECTS), animal=rng.choice(words.ANIMALS),
        animal_trait=rng.choice(words.TRAITS), friend=friend,
        friend_job=rng.choice(words.JOBS), kin=rng.choice(words.KIN),
        food=rng.choice(words.FOODS), weather=rng.choice(words.WEATHER),
        glad=rng.choice(words.GLAD), sad=rng.choice(words.SAD),
    )  # fmt: skip


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" or noun.startswith("honest") else "a ") + noun


_OPENINGS = (
    "Once upon a time there was {a_trait} {job} named {hero}. {He} lived in {a_place}.",
    "Once upon a time, in {a_place}, there lived {a_trait} {job} called {hero}.",
    "{hero} was {a_trait} {job} who lived in {a_place}.",
    "In {a_place} there was {a_job} whose name was {hero}. Everyone knew that {hero} was {trait}.",
    "Many years ago {a_trait} {job} named {hero} lived in {a_place} with {his} {kin}.",
    "There was once {a_job} named {hero}. {He} was {trait}, and {he} lived in {a_place}.",
)
# A plot is wish, journey, trouble, help and turn; each line keeps to the same cast.
_PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (  # something was lost
        ("More than anything, {hero} wanted to find the {thing} that was lost in the {wild}.",
         "{His} {kin} had lost {a_thing}, and {hero} wanted to bring it back.",
         "One day {hero} lost {a_thing} that {his} {kin} had given {him}."),
        ("{weather} when {he} set out for the {wild}.",
         "So {he} took some {food} and walked to the {wild}. {weather}.",
         "The next morning {hero} went to the {wild} to look for it."),
        ("{He} looked under every stone, but {he} could not find it, and {he} felt {sad}.",
         "Soon it grew dark, and {hero} was {sad}.",
         "{He} searched all day, but the {thing} was not there."),
        ("Then {a_animal} came out of the bushes. \"Why are you {sad}?\" asked the {animal}.",
         "{A_animal_trait} {animal} looked at {him} and said, \"I can help you.\"",
         "\"Please help me,\" said {hero} to {a_animal}. \"I will give you some {food}.\""),
        ("The {animal} ran ahead and showed {him} the {thing} under a tree.",
         "Together they looked again, and at last they found the {thing} near the water.",
         "The {animal} knew where the {thing} was, and soon it was in {his} hands again."),
    ),
    (  # a stranger in need
        ("Every morning {hero} carried {food} to the {wild}.",
         "{hero} had only one treasure, {a_thing}, and {he} carried it everywhere.",
         "One day {his} {kin} gave {him} {a_thing} and said, \"Keep it safe.\""),
        ("{weather}, and {hero} walked slowly along the path to the {wild}.",
         "On the way to the {wild} {he} sang a song. {weather}.",
         "One day {he} was walking through the {wild}. {weather}."),
        ("There {he} met {a_animal_trait} {animal} who was hurt and could not walk.",
         "There {he} saw {a_animal} that was cold and hungry.",
         "Suddenly {he} heard a voice. It was {a_animal} that had fallen into a hole."),
        ("{hero} gave the {animal} some {food} and sat down beside it.",
         "\"Do not be {sad},\" said {hero}. \"I will stay with you.\"",
         "{He} used the {thing} to help the {animal}, and then they shared some {food}."),
        ("The {animal} thanked {him} and promised to come back one day.",
         "From that day on, the {animal} followed {hero} everywhere.",
         "In the morning the {animal} was well again, and they became friends."),
    ),
    (  # a task
        ("The king asked {hero} to bring him {a_thing} from the {wild}.",
         "{hero} wanted to make {a_thing} for {his} {kin}, but {he} did not know how.",
         "{His} {kin} needed {a_thing}, but nobody in the {short_place} had one."),
        ("{weather} when {hero} began to work.",
         "{He} left early and walked for three days to the {wild}. {weather}.",
         "So {hero} packed some {food} and left the {short_place}."),
        ("The work was hard, and after a week {he} was {sad}.",
         "The path was blocked by a great stone, and {he} did not know what to do.",
         "{He} tried once, {he} tried twice, but it did not work."),
        ("Then {he} met {friend}, {a_friend_job}. \"Can you help me?\" asked {hero}.",
         "{friend}, who was {a_friend_job}, saw {him} and said, \"Let us do it together.\"",
         "An old {friend_job} named {friend} showed {him} a better way."),
        ("They worked all day, and in the evening the {thing} was ready.",
         "{friend} was strong, {hero} was {trait}, and together they did it.",
         "With the help of {friend}, {hero} came home with the {thing}."),
    ),
    (  # a mistake
        ("{hero} was {trait}, but {he} never listened to {his} {kin}.",
         "One day {hero} took {a_thing} that belonged to {friend}.",
         "{hero} and {friend} both wanted the same {thing}."),
        ("{weather}, and they met at the {wild}.",
         "That day {he} went to the {wild} alone. {weather}.",
         "In the night {he} hid it in the {wild}."),
        ("When {friend} heard about it, {hero} felt {sad}.",
         "There {he} lost {his} way and was {sad}.",
         "The {thing} fell into the water and broke."),
        ("\"I am sorry,\" said {hero} to {friend}. \"It was my mistake.\"",
         "{A_animal} said to {him}, \"Go home and tell the truth.\"",
         "{His} {kin} said, \"A {trait} heart is not enough. You must also be honest.\""),
        ("{hero} gave {friend} {a_thing} and some {food}.",
         "So {he} told the truth, and nobody was angry any more.",
         "{friend} smiled and said, \"Now we are friends again.\""),
    ),
    (  # a contest
        ("In the {short_place} there was a race every year, and {hero} wanted to win {a_thing}.",
         "{hero} and {friend} often asked who of them was better.",
         "The people of the {short_place} looked for the best {job}."),
        ("On the day of the race {weather_low}.",
         "They met early in the morning at the {wild}. {weather}.",
         "Everybody came to the {wild} to see it."),
        ("{friend} was fast, and {hero} was far behind.",
         "Half way to the end {hero} fell and felt {sad}.",
         "{hero} saw {a_animal} that needed help, and {he} stopped."),
        ("But {he} did not give up, and {he} went on step by step.",
         "\"Go on,\" said {a_animal} that sat beside the road. \"You are not too late.\"",
         "{friend} turned around, came back and gave {him} a hand."),
        ("In the end {hero} and {friend} came home at the same time.",
         "{He} was the last, but the people gave {him} the {thing}, because {he} was {trait}.",
         "{He} won the {thing} and shared the prize with {friend}."),
    ),
)  # fmt: skip
_ENDINGS = (
    "{hero} went home and was {glad}.",
    "That night {he} slept well, with the {thing} beside {his} bed.",
    '"Thank you," said {hero}. "I will always remember this day."',
    "They ate {food} together and were {glad}.",
    "And so {hero} lived happily in the {short_place} for many years.",
    "{His} {kin} was {glad} to see {him} again.",
    "{hero} learned that a true friend is worth more than {a_thing}.",
    "From that day on, {hero} was never {sad} again.",
)
_BRIDGES = (
    "It took three days to walk home.",
    "On the way back {he} sang a song.",
    "The next day {hero} told {his} {kin} about it.",
    "The people of the {short_place} heard about it and were {glad}.",
    "{hero} looked at the sky and smiled.",
)


def tale(rng: random.Random) -> str:
    """One tale of about 80 to 180 words."""
    cast = _cast(rng)
    slots = {name: getattr(cast, name) for name in _Cast.__slots__}
    slots |= {
        "He": cast.He,
        "His": cast.His,
        "weather_low": cast.weather[0].lower() + cast.weather[1:],
    }
    for name in ("trait", "job", "place", "thing", "animal", "animal_trait", "friend_job"):
        slots[f"a_{name}"] = _article(slots[name])
        slots[f"A_{name}"] = slots[f"a_{name}"].capitalize()
    slots["short_place"] = cast.place.split(" by ")[0].split(" on ")[0].split(" near ")[0]
    for word in (" beside ", " at ", " in ", " with "):
        slots["short_place"] = slots["short_place"].split(word)[0]

    def line(options: tuple[str, ...]) -> str:
        return rng.choice(options).format(**slots)

    parts = [line(_OPENINGS), *(line(options) for options in rng.choice(_PLOTS))]
    if rng.random() < 0.4:
        parts.append(line(_BRIDGES))
    endings = rng.sample(_ENDINGS, rng.randint(1, 2))
    parts += [ending.format(**slots) for ending in endings]
    if rng.random() < 0.4:
        return "\n\n".join((" ".join(parts[:2]), " ".join(parts[2:4]), " ".join(parts[4:])))
    return " ".join(parts)
