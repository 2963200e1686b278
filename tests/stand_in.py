"""onnxruntime with a provider that it lacks on this machine: the graphs run on the CPU's."""

import ctypes
import types
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest

CPU = "CPUExecutionProvider"


class Provided:
    """A session as onnxruntime opens it; `asked` holds the options of every one on the provider called `name`."""

    name: ClassVar[str]
    takes: ClassVar[str]  # who got the nodes, as onnxruntime tells afterwards
    asked: ClassVar[list[tuple[dict[str, str], Any]]]
    _real = onnxruntime.InferenceSession

    def __init__(self, file: str, options: Any, providers: list[Any]) -> None:
        self._options, self._providers = options, [CPU]
        if providers != [CPU]:
            ((name, own),) = providers
            assert name == self.name
            self.asked.append((own, options))
            self._providers = [name, CPU]
        self._session = self._real(file, onnxruntime.SessionOptions(), providers=[CPU])

    def get_providers(self) -> list[str]:
        return self._providers

    def get_session_options(self) -> Any:
        return self._options

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [types.SimpleNamespace(ep_name=self.takes, get_nodes=lambda: [1, 2, 3])]

    def io_binding(self) -> Any:
        real = self._session.io_binding()
        return real if self._providers == [CPU] else Binding(real)

    def run_with_iobinding(self, binding: Any) -> None:
        self._session.run_with_iobinding(getattr(binding, "real", binding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Binding:
    """onnxruntime's, for a provider with memory of its own: inputs are copied there when they are bound."""

    def __init__(self, real: Any) -> None:
        self.real, self._kept = real, dict[str, Any]()

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._kept[name] = kept = np.frombuffer(ctypes.string_at(address, count), np.uint8).copy()
        self.real.bind_input(name, device, number, dtype, shape, kept.ctypes.data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def provide(name: str, monkeypatch: pytest.MonkeyPatch) -> type[Provided]:
    """onnxruntime with a provider of this name, until the test is over."""
    made = type("Provided", (Provided,), {"name": name, "takes": name, "asked": []})
    monkeypatch.setattr(onnxruntime, "InferenceSession", made)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [name, CPU])
    return made
