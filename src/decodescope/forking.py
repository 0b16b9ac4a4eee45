"""What a fork takes over from the run it leaves: its settings, its tokens so far, its random numbers."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decodescope.errors import InputError
from decodescope.observe.description import settings_of
from decodescope.options import RunOptions
from decodescope.sampling.params import SamplingParams
from decodescope.trace.records import GUARDS, HELD, Run, Setting, Step, Trace


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """A fork about to be made: its header and sampling, the tokens kept, what differs from the run's settings, the
    draws made so far, and its folder."""

    run: Run
    params: SamplingParams
    generated: tuple[int, ...]
    settings: tuple[Setting, ...]
    draws: int
    folder: Path | None


def forked_options(trace: Trace, step: int) -> RunOptions:
    """The options of a run, for the tokens that it had left at `step`.

    Raises InputError for a step that the run does not have (its number of tokens: right behind the last).
    """
    run, steps = trace.run, len(trace.path())
    if not 0 <= step <= steps:
        raise InputError("fork.no_step", step=step, last=steps)
    return RunOptions(
        sampling=run.sampling,
        max_new_tokens=max(run.max_new_tokens - step, 1),
        stop=run.stop_strings,
        ignore_eos=not run.stop_ids,
        use_cache=run.use_cache,
        guards=run.guards,
    )


def plan_fork(
    trace: Trace, step: int, params: SamplingParams, options: RunOptions, held: Mapping[str, Any]
) -> ForkPlan:
    """What a fork at `step` starts from, under settings that may differ from the run's; `held` are the forms that
    the model at hand has (the fields of `Run` in HELD)."""
    if params.seed is None and not params.is_greedy:  # told, so that the fork can be repeated
        params = replace(params, seed=secrets.randbits(32))
    root, kept = trace.root or trace.run, trace.path()[:step]
    known = {setting.name: setting for setting in root.settings}
    settings = tuple(_as_known(each, known.get(each.name)) for each in settings_of(params, options.guards))
    told = [each for each in settings if each.name in known or each.origin != "default"]
    differing = [each for each in told if each != known.get(each.name)]
    if GUARDS in known and not options.guards:
        differing.append(Setting(GUARDS, "", "command line"))
    differing += [Setting(name, held[name], "command line") for name in HELD if held[name] != getattr(root, name)]
    return ForkPlan(
        run=replace(trace.run, settings=settings, stop_strings=options.stop, **held),
        params=params,
        generated=tuple(each.token_id for each in kept),
        settings=tuple(differing),
        draws=_draws(trace, kept),
        folder=Path(trace.end.trace) if trace.end and trace.end.trace else None,
    )


def _as_known(setting: Setting, known: Setting | None) -> Setting:
    """The run's own setting where the value is the same: whoever set it there."""
    return known if known is not None and known.value == setting.value else setting


def _draws(trace: Trace, path: Sequence[Step]) -> int:
    """How often the sampler drew on a path; a step chosen by hand had been drawn first."""
    makers, root = _makers(trace), (trace.root or trace.run).settings
    count, tempered = 0, None  # by guards
    for step in path:
        own = _temperature((*makers.get(step.node, ()), *root))
        count += (own if tempered is None else tempered) > 0
        for acted in step.interventions:
            tempered = acted.temperature if acted.temperature is not None else tempered
    return count


def _makers(trace: Trace) -> dict[int, tuple[Setting, ...]]:
    """The settings of the fork that made it, for every node that a fork made."""
    steps = {step.node: step for step in trace.steps}
    made = {}
    for fork in trace.branches:
        node = fork.end.node
        while node is not None and steps[node].step >= fork.step:
            made[node] = fork.settings
            node = steps[node].parent
    return made


def _temperature(settings: Sequence[Setting]) -> float:
    value = next((each.value for each in settings if each.name == "temperature"), None)
    return float(value) if isinstance(value, int | float) else 0.0
