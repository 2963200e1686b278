"""Which rows of the device table this machine can run, and why not the others."""

import importlib
import platform
import threading
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from specedge.devices.device import Device, Options, Package, Plugin, Soc
from specedge.errors import SpecedgeError, UsageError, first_line
from specedge.mlpackage import import_coremltools

_registering = threading.Lock()


@dataclass(frozen=True, slots=True)
class Provider:
    """A row's execution provider as it is found here.

    `sdk` is what a plug-in is built on, `soc` what it compiles for and emulates (None on the device itself), `devices` are
    onnxruntime's, of a plug-in. `evaluated` says that it is not Core ML that runs a package.
    """

    device: Device
    version: str
    sdk: str
    soc: Soc | None
    devices: tuple[Any, ...] = ()
    evaluated: bool = False

    @property
    def hardware(self) -> str:
        """What runs it, as far as onnxruntime tells: vendor, device and what its provider says of it, driver included."""
        found = []
        for one in self.devices:
            told = {**dict(one.device.metadata), **dict(one.ep_metadata)}
            known = ", ".join(f"{key} {value}" for key, value in sorted(told.items()) if value and "path" not in key)
            found.append(f"{one.ep_vendor} {one.device.vendor_id:#x}:{one.device.device_id:#x} {known}".strip())
        return "; ".join(found) or f"{self.device.provider} {self.version} on {platform.platform()}"

    @property
    def emulated(self) -> bool:
        """Whether the device is not here: numbers are right, times mean nothing."""
        return self.soc is not None or self.evaluated

    def options(self, more: Options = (), **values: str) -> dict[str, str]:
        """The plug-in's options for a session."""
        plugin = self.device.plugin
        assert plugin is not None
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
    if plugin is None:
        here = ort.get_available_providers()
        if soc is not None:
            raise UsageError(f"soc {soc!r}: device {device.name!r} compiles for none; leave it out")
        if device.provider not in here:
            raise SpecedgeError(f"device {device.name!r}: needs {device.provider}, onnxruntime here has {', '.join(here)}")
        return Provider(device, ort.__version__, "", None)
    chosen = _soc(device.name, plugin, soc)
    try:
        package = importlib.import_module(plugin.package)
    except ImportError as error:
        raise SpecedgeError(
            f"device {device.name!r}: needs {device.provider}, which is not installed here ({error}); "
            f"pip install 'specedge[{plugin.extra}]'"
        ) from error
    with _registering:
        found = _devices(device.provider)
        if not found:
            try:
                ort.register_execution_provider_library(device.provider, package.get_library_path())
            except Exception as error:  # onnxruntime raises its own unrelated exception types
                raise SpecedgeError(
                    f"device {device.name!r}: onnxruntime {ort.__version__} cannot load {device.provider} ({first_line(error)})"
                ) from error
            found = _devices(device.provider)
    if not found:
        raise SpecedgeError(f"device {device.name!r}: {device.provider} finds no device of its own on this machine")
    return Provider(device, str(package.__version__), _sdk(plugin), chosen, found)


def _find_core_ml(device: Device, package: Package) -> Provider:
    version = str(import_coremltools("", f"device {device.name!r}").__version__)
    system = platform.mac_ver()[0]
    if system and not package.evaluated and int(system.split(".")[0]) < package.macos:
        raise SpecedgeError(f"device {device.name!r}: its packages need macOS {package.macos}, this is {system}")
    return Provider(device, version, f"macOS {system}" if system else "", None, evaluated=package.evaluated or not system)


def probe(device: Device) -> Provider | str:
    """The provider of a row, or why it cannot be had."""
    try:
        return find_provider(device)
    except SpecedgeError as error:
        return str(error)


def _devices(provider: str) -> tuple[Any, ...]:
    """The NPUs of a plug-in; where onnxruntime lists none of a kind of its own, what it does list."""
    found = tuple(one for one in ort.get_ep_devices() if one.ep_name == provider)
    return tuple(one for one in found if one.device.type == ort.OrtHardwareDeviceType.NPU) or found


def _sdk(plugin: Plugin) -> str:
    module, _, attribute = plugin.sdk.rpartition(".")
    try:
        return str(getattr(importlib.import_module(f"{plugin.package}.{module}"), attribute))
    except (ImportError, AttributeError):
        return "unknown"


def _soc(name: str, plugin: Plugin, soc: str | None) -> Soc | None:
    """What is compiled for: the machine itself on the device, unless another is named."""
    if soc is None and platform.machine().lower() in ("aarch64", "arm64"):
        return None
    try:
        return plugin.soc(soc)
    except KeyError:
        known = ", ".join(one.name for one in plugin.socs)
        raise UsageError(f"soc {soc!r}: device {name!r} knows {known}") from None
