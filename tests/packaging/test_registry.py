"""The plugin registry, on distributions made up for the purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import CapabilityError, ConfigError
from deepinfer.device.numerics import Numerics
from deepinfer.device.probe import SEAM_VERSION
from deepinfer.device.registry import BackendInfo, list_backends, load_backend

MakeDistribution = Callable[[str, Mapping[str, str]], None]

HEADER = """
from types import SimpleNamespace
from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe
"""
CREATE = """
@hookimpl
def deepinfer_create_backend(config):
    return SimpleNamespace(name=config.name, options=config.options)
"""


def plugin(
    probe_arguments: str, *, probe_hook: str = "deepinfer_probe", create: str = CREATE
) -> str:
    """Return the source of a plugin module."""
    return (
        f"{HEADER}\n@hookimpl\ndef {probe_hook}():\n    return Probe({probe_arguments})\n{create}"
    )


def available(name: str, *, seam_version: int = SEAM_VERSION) -> str:
    """Return the arguments of a probe that sees a device."""
    return f"{name!r}, True, (), 'one toy', {seam_version}"


def config(name: str) -> BackendConfig:
    """Return the configuration that chooses `name`."""
    return BackendConfig(name, Numerics.EXACT, {"speed": 3})


def listed(name: str) -> BackendInfo:
    """Return the listing's only entry of this name."""
    (info,) = [info for info in list_backends() if info.name == name]
    return info


def test_available_backend_is_listed_with_its_distribution(
    make_distribution: MakeDistribution,
) -> None:
    make_distribution("toydist", {"toy": plugin(available("toy"))})
    info = listed("toy")
    assert info.available
    assert info.distribution == "toydist 1.5"
    assert info.probe is not None
    assert info.probe.device == "one toy"


def test_chosen_backend_is_created_with_its_configuration(
    make_distribution: MakeDistribution,
) -> None:
    make_distribution("toydist", {"toy": plugin(available("toy"))})
    backend = load_backend(config("toy"))
    assert backend.name == "toy"
    assert getattr(backend, "options") == {"speed": 3}  # noqa: B009 - only the toy has options


def test_broken_plugins_do_not_stop_the_listing(make_distribution: MakeDistribution) -> None:
    make_distribution(
        "mixed",
        {
            "unimportable": "import no_such_vendor_library",
            "exploding": plugin("1 / 0"),
            "sound": plugin(available("sound")),
        },
    )
    assert listed("sound").available
    assert "no_such_vendor_library" in listed("unimportable").reasons[0]
    assert "ZeroDivisionError" in listed("exploding").reasons[0]


def test_sound_backend_loads_beside_a_broken_one(make_distribution: MakeDistribution) -> None:
    make_distribution(
        "mixed", {"broken": "raise RuntimeError('no')", "sound": plugin(available("sound"))}
    )
    assert load_backend(config("sound")).name == "sound"


def test_broken_plugin_error_names_plugin_distribution_and_cause(
    make_distribution: MakeDistribution,
) -> None:
    make_distribution("toydist", {"toy": "import no_such_vendor_library"})
    with pytest.raises(
        CapabilityError,
        match=r"'toy' \(plugin toydist_toy_plugin of toydist 1\.5\).*no_such_vendor",
    ):
        load_backend(config("toy"))


def test_misspelt_hook_name_is_an_error_with_that_name(make_distribution: MakeDistribution) -> None:
    make_distribution("toydist", {"toy": plugin(available("toy"), probe_hook="deepinfer_prob")})
    with pytest.raises(CapabilityError, match=r"unknown hook 'deepinfer_prob'"):
        load_backend(config("toy"))


def test_missing_hook_is_an_error_with_its_name(make_distribution: MakeDistribution) -> None:
    make_distribution("toydist", {"toy": plugin(available("toy"), create="")})
    with pytest.raises(CapabilityError, match="hook deepinfer_create_backend is not implemented"):
        load_backend(config("toy"))


@pytest.mark.parametrize(
    ("seam_version", "older"), [(SEAM_VERSION + 1, "deepinfer-hal"), (0, "the plugin's package")]
)
def test_other_seam_version_is_refused_naming_both_and_the_older_side(
    make_distribution: MakeDistribution, seam_version: int, older: str
) -> None:
    make_distribution("toydist", {"toy": plugin(available("toy", seam_version=seam_version))})
    expected = rf"toydist 1\.5.*version {seam_version},.*version {SEAM_VERSION};.*update {older}"
    with pytest.raises(CapabilityError, match=expected):
        load_backend(config("toy"))
    assert not listed("toy").available


def test_unavailable_backend_is_refused_with_every_reason(
    make_distribution: MakeDistribution,
) -> None:
    arguments = f"'toy', False, ('no driver: install it', 'no device'), '', {SEAM_VERSION}"
    make_distribution("toydist", {"toy": plugin(arguments)})
    with pytest.raises(CapabilityError, match=r"(?s)toydist 1\.5.*driver: install it.*no device"):
        load_backend(config("toy"))
    assert listed("toy").reasons == ("no driver: install it", "no device")


def test_unknown_name_is_refused_with_the_nearest(make_distribution: MakeDistribution) -> None:
    make_distribution("toydist", {"toy_cpu": plugin(available("toy_cpu"))})
    with pytest.raises(ConfigError, match=r"backend\.name.*'toy_gpu'.*did you mean 'toy_cpu'"):
        load_backend(config("toy_gpu"))


def test_name_given_by_two_distributions_is_refused_naming_both(
    make_distribution: MakeDistribution,
) -> None:
    make_distribution("first", {"toy": plugin(available("toy"))})
    make_distribution("second", {"toy": plugin(available("toy"))})
    with pytest.raises(ConfigError, match=r"(?=.*first 1\.5)(?=.*second 1\.5)"):
        load_backend(config("toy"))


def test_probe_of_another_name_is_refused(make_distribution: MakeDistribution) -> None:
    make_distribution("toydist", {"toy": plugin(available("tay"))})
    with pytest.raises(CapabilityError, match=r"answers for 'tay'.*'toy'"):
        load_backend(config("toy"))


def test_probe_of_another_type_is_refused(make_distribution: MakeDistribution) -> None:
    source = f"{HEADER}\n@hookimpl\ndef deepinfer_probe():\n    return 'fine'\n{CREATE}"
    make_distribution("toydist", {"toy": source})
    with pytest.raises(CapabilityError, match="returned 'fine'"):
        load_backend(config("toy"))


def test_creation_failure_passes_with_a_note_naming_the_plugin(
    make_distribution: MakeDistribution,
) -> None:
    create = "\n@hookimpl\ndef deepinfer_create_backend(config):\n    return {}['driver']\n"
    make_distribution("toydist", {"toy": plugin(available("toy"), create=create)})
    with pytest.raises(KeyError) as caught:
        load_backend(config("toy"))
    assert "toydist 1.5" in caught.value.__notes__[0]


def test_creation_that_returns_nothing_is_refused(make_distribution: MakeDistribution) -> None:
    create = "\n@hookimpl\ndef deepinfer_create_backend(config):\n    return None\n"
    make_distribution("toydist", {"toy": plugin(available("toy"), create=create)})
    with pytest.raises(CapabilityError, match="returned None"):
        load_backend(config("toy"))
