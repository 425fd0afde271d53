"""The objects that a configuration names: of this project only, and of the types that their constructors declare."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import hydra
import typeguard
from hydra.errors import InstantiationException

from clasp_core.errors import UserError
from clasp_core.plan import Method
from clasp_core.records import Question

OWN_PACKAGES = ("clasp_core.", "baselines.")


def build_methods(config: Mapping[str, Any]) -> tuple[dict[str, Method], str | None]:
    """The reference (named `ar`) and the selected methods; a method of that name gets another one."""
    methods: dict[str, Method] = {}
    reference = None
    if config["reference"]:
        reference = "ar"
        methods[reference] = build(config["reference"], "reference")
    for name, node in config.get("method", {}).items():
        methods["ar_again" if name == reference else name] = build(node, f"method.{name}")
    if not methods:
        raise UserError("nothing to run: method=[] and reference=none; choose at least one method")
    return methods, reference


def build_questions(config: Mapping[str, Any]) -> list[Question]:
    """The questions of all selected tasks."""
    nodes = {name: node for name, node in config["task"].items() if name != "subtasks"}
    only = {"subtasks": config["task"]["subtasks"]} if config["task"]["subtasks"] is not None else {}
    tasks = [build({**node, **only}, f"task.{name}") for name, node in nodes.items()]
    questions = [question for task in tasks for question in task.questions(config["limit"])]
    if not questions:
        raise UserError("no questions: task=[] selects none; choose at least one task")
    keys = [(question.task, question.question_id) for question in questions]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UserError(f"question {min(twice)[1]} is in two of the selected tasks; choose one of them")
    return questions


def build(node: Any, place: str) -> Any:
    """The object of a configuration node; only classes of this project may be named there."""
    for target in targets(node):
        if not target.startswith(OWN_PACKAGES):
            raise UserError(f"{place} names _target_ {target!r}; it must lie in {' or '.join(OWN_PACKAGES)}")
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(
            f"{place} has options but is not selected: {node!r}; add "
            f"{place.replace('.', '=', 1)} to the command, or drop the option"
        )
    check_types(node, place)
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{place} cannot be built: {str(error.__cause__ or error).splitlines()[0]}") from error


def check_types(node: Mapping[str, Any], place: str) -> None:
    """Refuse a value whose type is not the one that the constructor of `_target_` declares."""
    try:
        hints = typing.get_type_hints(constructor := hydra.utils.get_object(node["_target_"]))
    except ImportError:
        raise UserError(
            f"{place} names _target_ {node['_target_']!r}, which does not exist; correct its name"
        ) from None
    if isinstance(constructor, type):
        hints = typing.get_type_hints(constructor.__init__)  # type: ignore[misc]
    for key, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            check_types(value, f"{place}.{key}")
        elif key in hints:
            try:
                typeguard.check_type(value, hints[key])
            except typeguard.TypeCheckError:
                wanted = str(hints[key]).replace("typing.", "").replace("NoneType", "null").replace("None", "null")
                wanted = getattr(hints[key], "__name__", wanted) if isinstance(hints[key], type) else wanted
                raise UserError(f"{place}.{key} is {value!r}; it must be {wanted}") from None


def targets(node: Any) -> list[str]:
    """Every `_target_` at or below a node."""
    if not isinstance(node, Mapping):
        return []
    here = [str(node["_target_"])] if "_target_" in node else []
    return here + [target for child in node.values() for target in targets(child)]
