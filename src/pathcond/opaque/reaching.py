"""Whether code that cannot be followed may reach into a module that it calls.

A dispatch that calls ``expert(x)`` on the example might, on other inputs, call ``expert.up(x)`` or
read ``expert.up.weight``: then nothing inside the expert may be rescaled. What a branch does that
the example does not take is found by reading the code: any mention of a name from inside the
module, any look-up below it, counts.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..capture.contents import walk
from ..capture.isolation import TABLES

# Names that give access to everything.
MASTER_KEYS = frozenset(
    "children named_children modules named_modules parameters named_parameters buffers "
    "named_buffers state_dict _modules "
    "_parameters _buffers get_submodule get_parameter __dict__ vars setattr delattr".split()
)
PASSES_ON = frozenset(
    "enumerate zip list tuple reversed iter next sorted getattr filter map".split()
)
HARMLESS = frozenset("len isinstance range int print type callable hasattr id str".split())
OF_CLASS = (FunctionType, property, functools.cached_property, classmethod, staticmethod)
VIEWS = frozenset("items values get pop keys".split())


def code_of(module: nn.Module, executed: Iterable[CodeType]) -> list[CodeType]:
    """What a module executed on the example, and its other methods, which it may call on other
    inputs.
    """
    methods = [
        value.__code__
        for kind in type(module).__mro__
        if not kind.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and name != "__init__"
    ]
    return list(dict.fromkeys([*executed, *methods]))


def may_reach_into(child: nn.Module, attribute: str, codes: Iterable[CodeType]) -> bool:
    """Whether some code may read or call what is inside a module.

    Args:
        child: The module.
        attribute: The last part of its qualified name.
        codes: All code of the module that calls it.
    """
    codes = list(codes)
    mentioned = {name for code in codes for name in _names(code)}
    inside = {
        name.rpartition(".")[2] for name, _ in [*child.named_parameters(), *child.named_buffers()]
    }
    inside |= {
        name.rpartition(".")[2]
        for name, part in child.named_modules()
        if name and any(True for _ in part.parameters())
    }
    inside |= _methods(child)
    if mentioned & (MASTER_KEYS | {name for name in inside if not name.isdigit()}):
        return True
    if any(map(_calls_forward, codes)) or _attributes(child) & {
        name for code in codes for name in _names_assigned(code)
    }:
        return True
    numbered = any(name.isdigit() for name in inside)
    return (numbered or "getattr" in mentioned) and _looks_up(codes, attribute, numbered=numbered)


def _methods(child: nn.Module) -> set[str]:
    """Names by which a module's own methods and properties are reached; tensors and all modules
    have others.
    """
    kinds = {kind for part in child.modules() for kind in type(part).__mro__}
    return {
        name
        for kind in kinds
        if not kind.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(kind).items()
        if isinstance(value, OF_CLASS)
        and not name.startswith("__")
        and not hasattr(Tensor, name)
        and not hasattr(nn.Module, name)
    }


def _attributes(child: nn.Module) -> set[str]:
    """Names of all attributes of a module and its parts, but for those that its class alone has."""
    return {name for part in child.modules() for name in vars(part)}


def _names_assigned(code: CodeType) -> Iterator[str]:
    """Names of attributes that code assigns, but for those of the module that it belongs to."""
    steps = list(dis.get_instructions(code))
    for before, step in zip([None, *steps], steps, strict=False):
        own = (
            before is not None
            and before.opname.startswith("LOAD_FAST")
            and before.argval == next(iter(code.co_varnames), None)
        )
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and not own:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_assigned(constant)


def _calls_forward(code: CodeType) -> bool:
    """Whether code calls ``forward`` of another module by its name; ``super().forward`` is its
    own.
    """
    steps = list(dis.get_instructions(code))
    called = [i for i, step in enumerate(steps) if step.argval == "forward"]
    of_super = [any(s.argval == "super" for s in steps[max(i - 5, 0) : i]) for i in called]
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return not all(of_super) or any(map(_calls_forward, inner))


def parts_held_elsewhere(child: nn.Module, holders: Iterable[nn.Module]) -> nn.Module | None:
    """The first of some modules that has a part of a module in an attribute of its own: a list of
    layers, a method of one.
    """
    inside = {id(part) for part in (*child.modules(), *child.parameters(), *child.buffers())}
    own = set(child.modules())
    others = (holder for holder in holders if holder not in own)
    return next(
        (holder for holder in others if not inside.isdisjoint(map(id, _held_aside(holder, own)))),
        None,
    )


def _held_aside(holder: nn.Module, others: Iterable[nn.Module]) -> Iterator[Any]:
    """What the attributes of a module hold, but for what lies in its own modules and in others."""
    attributes = [value for name, value in vars(holder).items() if name not in TABLES]
    modules = {id(module) for module in (*holder.modules(), *others)}
    return walk(attributes, closed=lambda part: id(part) in modules)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)


def _looks_up(codes: Iterable[CodeType], attribute: str, *, numbered: bool) -> bool:
    """Whether code may index or iterate a module whose parts are numbered, or get a part by a name
    that is not written there; True if its source cannot be read.
    """
    functions: dict[str, _LookUps] = {}
    for code in codes:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        except (OSError, TypeError, SyntaxError):
            return True
        known = functions.get(code.co_name)
        if known is None:
            functions[code.co_name] = _LookUps(
                code.co_varnames[: code.co_argcount], attribute, [*ast.walk(tree)], functions
            )
        else:  # two functions of one name: what is handed to one may be handed to the other
            known.nodes += ast.walk(tree)
            known.held.update(code.co_varnames[: min(1, code.co_argcount)])
    before = -1
    while (held := sum(len(function.held) for function in functions.values())) > before:
        before = held
        for function in functions.values():
            function.follow()
    return any(
        function.gets_by_name(node) or (numbered and function.looks_below(node))
        for function in functions.values()
        for node in function.nodes
    )


class _LookUps:
    """Follows which names of a function may hold modules, or containers of modules."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        attribute: str,
        nodes: list[ast.AST],
        functions: dict[str, _LookUps],
    ) -> None:
        self.arguments = arguments
        self.attribute = attribute
        self.nodes = nodes
        self.functions = functions
        self.root = arguments[0] if arguments else ""
        self.held = {self.root}

    def follow(self) -> None:
        """Pass on what is known so far, to names and to the arguments of functions that are
        known.
        """
        for node in self.nodes:
            self._bind(node)
            called = self._callee(node)
            if called is not None:
                method = isinstance(node.func, ast.Attribute)  # type: ignore[attr-defined]
                names = called.arguments[1:] if method else called.arguments
                parts: list[ast.expr] = node.args  # type: ignore[attr-defined]
                pairs = zip(names, parts, strict=False)
                called.held.update(name for name, part in pairs if self._holds(part))

    def _callee(self, node: ast.AST) -> _LookUps | None:
        """The function of the same module that a call goes to, if it is known and given arguments
        by place.
        """
        if (
            not isinstance(node, ast.Call)
            or node.keywords
            or any(isinstance(part, ast.Starred) for part in node.args)
        ):
            return None
        if isinstance(node.func, ast.Attribute) and self._is(node.func.value, self.root):
            return self.functions.get(node.func.attr)
        return self.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None

    @staticmethod
    def _is(node: ast.AST, name: str) -> bool:
        return isinstance(node, ast.Name) and node.id == name

    def _bind(self, node: ast.AST) -> None:
        """Names that are given something that may hold modules."""
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets = [node.target]
            value = node.iter
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            targets = [node.target]
            value = node.value
        else:
            return
        if self._holds(value):
            names = (
                leaf.id
                for target in targets
                for leaf in ast.walk(target)
                if isinstance(leaf, ast.Name)
            )
            self.held.update(names)

    def _holds(self, node: ast.AST) -> bool:
        """Whether an expression may evaluate to a module or a container of modules."""
        if isinstance(node, ast.Name):
            return node.id in self.held
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            return self._holds(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                return node.func.id in PASSES_ON and any(
                    self._holds(argument) for argument in node.args
                )
            return (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in VIEWS
                and self._holds(node.func.value)
            )
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Tuple, ast.List)):
            return any(self._holds(part) for part in ast.iter_child_nodes(node))
        return False

    def gets_by_name(self, node: ast.AST) -> bool:
        """Whether an expression gets an attribute of what may be a module by a name that is
        computed.
        """
        return (
            isinstance(node, ast.Call)
            and self._is(node.func, "getattr")
            and len(node.args) > 1
            and not isinstance(node.args[1], ast.Constant)
            and self._holds(node.args[0])
            and not self._is_container(node.args[0])
        )

    def looks_below(self, node: ast.AST) -> bool:
        """Whether an expression looks up or iterates what may be a module, or hands one to unknown
        code.
        """
        if isinstance(node, ast.Subscript):
            return self._holds(node.value) and not self._is_container(node.value)
        if isinstance(node, (ast.For, ast.comprehension)):
            return any(
                self._holds(part) and not self._is_container(part)
                for part in self._iterables(node.iter)
            )
        if isinstance(node, ast.Call) and self._callee(node) is None:
            known = isinstance(node.func, ast.Name) and node.func.id in PASSES_ON | HARMLESS
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            return not known and any(
                self._holds(part) and not self._may_be_passed(part) for part in given
            )
        return False

    def _may_be_passed(self, node: ast.AST) -> bool:
        """``self`` and its own attributes may be passed on: functions that are executed are read
        too.
        """
        return self._is(node, self.root) or self._is_container(node)

    def _iterables(self, node: ast.AST) -> list[ast.AST]:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in PASSES_ON
        ):
            return [part for argument in node.args for part in self._iterables(argument)]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in VIEWS
        ):
            return [node.func.value]
        return [node]

    def _is_container(self, node: ast.AST) -> bool:
        """``self`` and ``self.experts``, whose members are modules; not ``self.net`` if that is the
        module itself.
        """
        if isinstance(node, ast.Name):
            return node.id == self.root
        return (
            isinstance(node, ast.Attribute)
            and self._is(node.value, self.root)
            and node.attr != self.attribute
        )
