"""Results remembered by what they depend on: thousands of layouts share most of what is computed for one."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

Result = TypeVar("Result")
First = TypeVar("First")
Others = ParamSpec("Others")
Method = Callable[Concatenate[Any, First, Others], Result]


def remember(*fields: str) -> Callable[[Method[First, Others, Result]], Method[First, Others, Result]]:
    """Decorate a method: its result is kept by these fields of its first argument, or by the argument itself where none are
    named, and by the other arguments, for as long as the object lives. For one thread."""
    read: Callable[[Any], Any] = attrgetter(*fields) if fields else lambda first: first

    def decorate(method: Method[First, Others, Result]) -> Method[First, Others, Result]:
        slot, make = f"_results_of_{method.__name__}", cast(Callable[..., Result], method)

        @wraps(method)
        def ask(self: Any, first: Any, *others: Any) -> Result:
            key = read(first), others
            try:
                found: Result = self.__dict__[slot][key]
            except KeyError:
                found = self.__dict__.setdefault(slot, {})[key] = make(self, first, *others)
            return found

        return cast(Method[First, Others, Result], ask)

    return decorate
