"""onnxruntime with a provider that it lacks on this machine: the graphs run on the CPU's."""

import types
from typing import Any, ClassVar

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def provide(name: str, monkeypatch: pytest.MonkeyPatch) -> type[Provided]:
    """onnxruntime with a provider of this name, until the test is over."""
    made = type("Provided", (Provided,), {"name": name, "takes": name, "asked": []})
    monkeypatch.setattr(onnxruntime, "InferenceSession", made)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [name, CPU])
    return made
