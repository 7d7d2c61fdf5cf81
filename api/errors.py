"""Typed errors. Each names the argument, what it got, what is supported and, where there is one, what to do."""

from __future__ import annotations

from typing import Any


def install_hint(*extras: str) -> str:
    """How to get what an extra of this package brings, the usual one first; it holds wherever qla came from."""
    names = " or ".join(extras)
    return f"install qla with the extra {names}: in a clone, pip install '.[{extras[0]}]'"


class QlaError(Exception):
    """Base of all errors raised by qla itself."""


class UnsupportedError(QlaError, ValueError):
    """An argument whose value is not supported; also a `ValueError`.

    Parameters
    ----------
    argument : name of the argument as the caller wrote it.
    got : what was passed (a shape, a dtype, a value).
    supported : what would have been accepted.
    hint : what to do instead, if there is something.
    """

    def __init__(self, argument: str, got: Any, supported: str, hint: str = "") -> None:
        self.argument, self.got, self.supported, self.hint = argument, got, supported, hint
        text = f"{argument}: got {got}; supported: {supported}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> Any:  # by default an error is rebuilt from its text alone, which fails in a process pool
        return type(self), (self.argument, str(self.got), self.supported, self.hint)


class TemplateError(QlaError):
    """A template that cannot be rendered: an undefined name, an unknown verb or tile."""


class ScheduleError(QlaError):
    """A schedule that cannot be run: a result used before it is awaited, or shared memory over the target's limit."""


class CompilerNotFoundError(QlaError):
    """No compiler for the target is installed; the message names the package that brings one."""


class CompilationError(QlaError):
    """The compiler refused the source. Carries the log and the path of the rendered source.

    Parameters
    ----------
    message : what was compiled, and with what.
    log : the compiler's own output.
    source_path : where the rendered source lies.
    """

    def __init__(self, message: str, log: str, source_path: str) -> None:
        self.message, self.log, self.source_path = message, log, source_path
        super().__init__(f"{message}\nsource: {source_path}\n{log}")

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.log, self.source_path)


class LaunchError(QlaError):
    """The driver refused to load or launch a kernel."""


class HipError(LaunchError):
    """A call of the HIP runtime failed.

    Parameters
    ----------
    what : was tried.
    name : of the `hipError_t`, e.g. ``"hipErrorNoBinaryForGpu"``.
    code : its number.
    """

    def __init__(self, what: str, name: str, code: int) -> None:
        self.what, self.name, self.code = what, name, code
        super().__init__(f"{what}: {name} ({code})")

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.name, self.code)


class CaptureError(QlaError):
    """A kernel would have to be compiled or loaded inside a graph capture; the message says what to run before it."""
