"""Which rows of the device table this machine can run, and why not the others."""

import importlib
import platform
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from typing import Any

import onnxruntime as ort

from specedge.devices.device import Catalog, Device, Options, Package, Plugin, Soc
from specedge.errors import SpecedgeError, UsageError, first_line
from specedge.mlpackage import import_coremltools

_registering, _registered = threading.Lock(), set[str]()
_TELLING = re.compile(r"name|description|driver|version|device_id|architecture", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Provider:
    """A row's execution provider as it is found here.

    `name` is what onnxruntime calls it. `sdk` is what a plug-in is built on, `soc` what it compiles for and emulates (None on
    the device itself), `devices` are onnxruntime's, of what it does not bring itself. `evaluated` says that it is not Core ML
    that runs a package.
    """

    device: Device
    name: str
    version: str
    sdk: str
    soc: Soc | None
    devices: tuple[Any, ...] = ()
    evaluated: bool = False

    @property
    def hardware(self) -> str:
        """What runs it, as far as onnxruntime tells: vendor, device, and what is said of names, drivers and versions."""
        found = []
        for one in self.devices:
            told = {**dict(one.device.metadata), **dict(one.ep_metadata)}
            known = ", ".join(str(value) for key, value in sorted(told.items()) if value and _TELLING.search(key))
            found.append(f"{one.ep_vendor} {one.device.vendor_id:#x}:{one.device.device_id:#x} {known}".strip())
        return "; ".join(found) or f"{self.device.provider} {self.version} on {platform.platform()}"

    @property
    def emulated(self) -> bool:
        """Whether the device is not here: numbers are right, times mean nothing."""
        return self.soc is not None or self.evaluated

    def options(self, more: Options = (), **values: str) -> dict[str, str]:
        """The plug-in's options for a session; providers of a catalog have none of their own."""
        plugin = self.device.plugin
        if plugin is None:
            return {}
        if self.soc:
            values |= {"model": str(self.soc.model), "architecture": str(self.soc.architecture)}
        own = plugin.soc_options if self.soc else plugin.hardware_options
        return {name: value.format(**values) for name, value in (*plugin.options, *own, *more)}


def find_provider(device: Device, soc: str | None = None) -> Provider:
    """The provider of a row, registered if it is a plug-in; `soc` names what a plug-in compiles for.

    Raises:
        SpecedgeError: It is not here; says what is, and what to install.
    """
    plugin = device.plugin
    if device.package:
        return _find_core_ml(device, device.package)
    if device.catalog:
        return _find_in_catalog(device, device.catalog)
    if plugin is None:
        here = ort.get_available_providers()
        if soc is not None:
            raise UsageError(f"soc {soc!r}: device {device.name!r} compiles for none; leave it out")
        if device.provider not in here:
            raise SpecedgeError(f"device {device.name!r}: needs {device.provider}, onnxruntime here has {', '.join(here)}")
        return Provider(device, device.provider, ort.__version__, "", None)
    chosen = _soc(device.name, plugin, soc)
    try:
        package = importlib.import_module(plugin.package)
    except ImportError as error:
        raise SpecedgeError(
            f"device {device.name!r}: needs {device.provider}, which is not installed here ({error}); "
            f"pip install 'specedge[{plugin.extra}]'"
        ) from error
    try:
        _register(device.provider, package.get_library_path())
    except Exception as error:  # onnxruntime raises its own unrelated exception types
        raise SpecedgeError(
            f"device {device.name!r}: onnxruntime {ort.__version__} cannot load {device.provider} ({first_line(error)})"
        ) from error
    found = _devices(device.provider)
    if not found:
        raise SpecedgeError(f"device {device.name!r}: {device.provider} finds no device of its own on this machine")
    version = getattr(package, "__version__", None) or metadata.version(plugin.package.replace("_", "-"))
    return Provider(device, device.provider, str(version), _sdk(plugin), chosen, found)


def _find_core_ml(device: Device, package: Package) -> Provider:
    version = str(import_coremltools("", f"device {device.name!r}").__version__)
    system = platform.mac_ver()[0]
    if system and not package.evaluated and int(system.split(".")[0]) < package.macos:
        raise SpecedgeError(f"device {device.name!r}: its packages need macOS {package.macos}, this is {system}")
    evaluated = package.evaluated or not system
    return Provider(device, device.provider, version, f"macOS {system}" if system else "", None, evaluated=evaluated)


def _find_in_catalog(device: Device, catalog: Catalog) -> Provider:
    """The first provider of the system's catalog that has a device of the kinds wanted; none is downloaded."""
    try:
        package = importlib.import_module(catalog.package)
    except (ImportError, OSError) as error:
        raise SpecedgeError(
            f"device {device.name!r}: needs {device.provider}, which is not here ({first_line(error)}); on Windows, "
            f"pip install 'specedge[{catalog.extra}]' as docs/windows.md says"
        ) from error
    failed: list[str] = []
    try:
        with package.EpCatalog() as listed:
            for one in listed.find_all_providers():
                if one.ready_state == package.EpReadyState.NotPresent or _listed(one.name, catalog) is None:
                    continue
                try:
                    one.ensure_ready()
                    _register(one.name, one.library_path)
                except Exception as error:  # native calls; the next one may do
                    failed.append(f"{one.name} cannot be loaded ({first_line(error)})")
    except Exception as error:  # native calls
        raise SpecedgeError(f"device {device.name!r}: {device.provider} cannot be asked ({first_line(error)})") from error
    return choose(device, catalog, ort.get_ep_devices(), failed)


def _register(name: str, library: str) -> None:
    """Have onnxruntime load a library, unless it did, for us or the app around us; one that failed may be retried."""
    with _registering:
        if name.lower() not in _registered and not _devices(name):
            ort.register_execution_provider_library(name, library)
            _registered.add(name.lower())


def choose(device: Device, catalog: Catalog, devices: Sequence[Any], failed: Sequence[str] = ()) -> Provider:
    """Of onnxruntime's devices the first of the kinds and providers that a catalog is wanted for.

    Raises:
        SpecedgeError: There is none; `failed` says what could not be loaded.
    """
    for kind, name in product(catalog.kinds, catalog.providers):
        for one in devices:
            if _kind(one) == kind and _listed(one.ep_name, catalog) == name:
                version = dict(one.ep_metadata).get("version", ort.__version__)
                return Provider(device, one.ep_name, version, device.provider, None, (one,))
    here = ", ".join(sorted({f"{one.ep_name} ({_kind(one)})" for one in devices})) or "none"
    raise SpecedgeError(
        f"device {device.name!r}: {device.provider} has no {' or '.join(catalog.kinds)} here for "
        f"{', '.join(catalog.providers)}; {'; '.join((*failed, f'onnxruntime lists {here}'))}"
    )


def _listed(name: str, catalog: Catalog) -> str | None:
    """A provider as the row spells it: catalogs spell one in two ways."""
    return next((known for known in catalog.providers if known.lower() == name.lower()), None)


def _kind(one: Any) -> str:
    return str(one.device.type.name)


def probe(device: Device) -> Provider | str:
    """The provider of a row, or why it cannot be had."""
    try:
        return find_provider(device)
    except SpecedgeError as error:
        return str(error)


def _devices(provider: str) -> tuple[Any, ...]:
    """A plug-in's device, of the best kind that is here: an NPU, else a GPU of its own memory, else what it lists besides."""
    found = [one for one in ort.get_ep_devices() if one.ep_name == provider]
    kinds = ("NPU", "GPU")
    found.sort(key=lambda one: (_kind(one) not in kinds, _kind(one) != "NPU", dict(one.device.metadata).get("Discrete") != "1"))
    return tuple(found[:1])


def _sdk(plugin: Plugin) -> str:
    if not plugin.sdk:
        return ""
    module, _, attribute = plugin.sdk.rpartition(".")
    try:
        return str(getattr(importlib.import_module(f"{plugin.package}.{module}"), attribute))
    except (ImportError, AttributeError):
        return "unknown"


def _soc(name: str, plugin: Plugin, soc: str | None) -> Soc | None:
    """What is compiled for: the machine itself on the device, unless another is named, or nothing is compiled elsewhere."""
    if soc is None and not plugin.socs:
        return None
    if soc is None and platform.machine().lower() in ("aarch64", "arm64"):
        return None
    try:
        return plugin.soc(soc)
    except KeyError:
        known = ", ".join(one.name for one in plugin.socs) or "none; leave it out"
        raise UsageError(f"soc {soc!r}: device {name!r} knows {known}") from None
