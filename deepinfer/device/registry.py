"""Finds backends by their entry points, asks them whether they can run, and creates the chosen one.

Each plugin gets a plugin manager of its own, so a broken one can neither stop the listing nor
influence another one. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

from deepinfer.device import hookspecs
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import CapabilityError, ConfigError
from deepinfer.device.probe import SEAM_VERSION, Probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepinfer.device.backend import Backend
    from deepinfer.device.op import OpChoice

logger = logging.getLogger(__name__)

_REQUIRED_HOOKS = ("deepinfer_probe", "deepinfer_create_backend")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One entry of the backend listing.

    Attributes:
        name: entry point name, what `backend.name` selects.
        module: dotted path of the plugin module.
        distribution: name and version of the installed package that brings it.
        probe: the plugin's own answer; None if it could not be asked.
        load_error: why it could not be asked, or an empty string.
    """

    name: str
    module: str
    distribution: str
    probe: Probe | None
    load_error: str

    @property
    def available(self) -> bool:
        """Whether the backend can be created here."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the backend cannot be created here, one entry per cause; empty if it can."""
        if self.probe is None:
            return (self.load_error,)
        if self.probe.seam_version != SEAM_VERSION:
            return (_seam_mismatch(self.probe.seam_version),)
        return self.probe.reasons

    @property
    def title(self) -> str:
        """The plugin and its origin, as error messages name it."""
        return f"backend {self.name!r} (plugin {self.module} of {self.distribution})"


class _PluginError(Exception):
    """A plugin cannot be imported, registered or probed; the message says why."""


def list_backends(options: Mapping[str, Mapping[str, object]] | None = None) -> list[BackendInfo]:
    """Return every installed backend, sorted by name; a broken plugin is listed with its error.

    Args:
        options: `backend.options` to probe a backend with, by its name.
    """
    chosen = options or {}
    entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    infos = (_inspect(ep, chosen.get(ep.name, {})) for ep in entry_points)
    return sorted(infos, key=lambda info: (info.name, info.module))


def load_backend(config: BackendConfig) -> Backend:
    """Return the backend that `config.name` selects, created with `config`.

    Args:
        config: name of an entry point of the group `deepinfer.backends`, numerics and options.
    Raises:
        ConfigError: no installed package, or more than one, has a backend of this name.
        CapabilityError: the plugin is broken, written for another seam version, or not available.
    """
    entry_point = _find(config.name)
    info = BackendInfo(entry_point.name, entry_point.value, _distribution(entry_point), None, "")
    try:
        manager = _register(entry_point)
        probe = _probe(manager, entry_point.name, config.options)
    except _PluginError as error:
        raise _cannot_load(info, error) from error
    if probe.seam_version != SEAM_VERSION:
        raise CapabilityError(f"{info.title}: {_seam_mismatch(probe.seam_version)}")
    if not probe.available:
        missing = "\n".join(f"  - {reason}" for reason in probe.reasons)
        raise CapabilityError(f"{info.title} is not available here:\n{missing}")
    try:
        backend: Backend | None = manager.hook.deepinfer_create_backend(config=config)
    except Exception as error:
        # Passed on unchanged, whatever it is; the note says whose code raised it.
        error.add_note(f"raised while creating {info.title}")
        raise
    if backend is None:
        raise CapabilityError(
            f"{info.title}: deepinfer_create_backend returned None; it has to return a Backend"
        )
    logger.info("using %s on %s", info.title, probe.device)
    return backend


def plan_backend(config: BackendConfig) -> Sequence[OpChoice]:
    """Return what the backend that `config.name` selects would use on its device.

    Args:
        config: name of an entry point of the group `deepinfer.backends`, numerics and options.
    Raises:
        ConfigError: no installed package, or more than one, has a backend of this name.
        CapabilityError: the plugin is broken, or cannot tell without its device.
    """
    entry_point = _find(config.name)
    info = BackendInfo(entry_point.name, entry_point.value, _distribution(entry_point), None, "")
    try:
        manager = _register(entry_point)
    except _PluginError as error:
        raise _cannot_load(info, error) from error
    plan: Sequence[OpChoice] | None = manager.hook.deepinfer_plan(config=config)
    if plan is None:
        raise CapabilityError(
            f"{info.title} has no hook deepinfer_plan, so it says what it uses only where it is "
            "available: leave out --assume and run there"
        )
    return plan


def _cannot_load(info: BackendInfo, error: _PluginError) -> CapabilityError:
    return CapabilityError(
        f"{info.title} cannot be loaded: {error}; repair or uninstall this package, or choose "
        "another backend"
    )


def _find(name: str) -> importlib.metadata.EntryPoint:
    entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    found = [ep for ep in entry_points if ep.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        origins = ", ".join(f"{ep.value} of {_distribution(ep)}" for ep in found)
        raise ConfigError(
            f"backend.name: {len(found)} plugins are called {name!r} ({origins}); uninstall all "
            "but one"
        )
    known = sorted(entry_points.names)
    if not known:
        raise ConfigError(
            f"backend.name: no backend {name!r}, and none at all is installed; entry points are "
            "read from installed packages, so install the project itself (pip install -e .)"
        )
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigError(
        f"backend.name: no backend {name!r}; {hint}installed are {', '.join(known)}. Other "
        "backends come with a package that has an entry point in the group "
        f"{hookspecs.ENTRY_POINT_GROUP!r}"
    )


def _inspect(
    entry_point: importlib.metadata.EntryPoint, options: Mapping[str, object]
) -> BackendInfo:
    distribution = _distribution(entry_point)
    try:
        probe = _probe(_register(entry_point), entry_point.name, options)
    except _PluginError as error:
        logger.debug("backend %s of %s", entry_point.name, distribution, exc_info=True)
        return BackendInfo(entry_point.name, entry_point.value, distribution, None, str(error))
    return BackendInfo(entry_point.name, entry_point.value, distribution, probe, "")


def _register(entry_point: importlib.metadata.EntryPoint) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(entry_point.load(), name=entry_point.name)
        manager.check_pending()  # a misspelt hook name passes registration, not this
    except Exception as error:
        # Foreign code runs here: whatever it raises becomes a reason that names the plugin.
        raise _PluginError(f"{type(error).__name__}: {error}") from error
    for hook in _REQUIRED_HOOKS:
        if not getattr(manager.hook, hook).get_hookimpls():
            raise _PluginError(
                f"the hook {hook} is not implemented; define it in {entry_point.value} and mark it "
                "with deepinfer.device.hookspecs.hookimpl"
            )
    return manager


def _probe(manager: pluggy.PluginManager, name: str, options: Mapping[str, object]) -> Probe:
    try:
        probe = manager.hook.deepinfer_probe(options=options)
    except Exception as error:
        # Foreign code again, see _register.
        raise _PluginError(f"deepinfer_probe: {type(error).__name__}: {error}") from error
    if not isinstance(probe, Probe):
        raise _PluginError(f"deepinfer_probe returned {probe!r}; it has to return a Probe")
    if probe.name != name:
        raise _PluginError(
            f"deepinfer_probe answers for {probe.name!r}, the entry point is called {name!r}; "
            "both names have to be equal"
        )
    return probe


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    if entry_point.dist is None:
        return "an unknown distribution"
    return f"{entry_point.dist.name} {entry_point.dist.version}"


def _seam_mismatch(plugin_version: int) -> str:
    newer, remedy = (
        ("plugin", "deepinfer-hal")
        if plugin_version > SEAM_VERSION
        else ("installed deepinfer-hal", "the plugin's package")
    )
    return (
        f"it was written for seam version {plugin_version}, the installed deepinfer-hal has seam "
        f"version {SEAM_VERSION}; the {newer} is newer, so update {remedy}"
    )
