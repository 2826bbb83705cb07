"""How many groups may be on their way, and how old the weights may be that they begin with.

The bound is cumulative: groups that count are those admitted and not dropped, trained ones
included, and after `step` optimizer steps no more may count than the next
`max_staleness_steps + 1` steps can train. Every trained step took `groups_per_step` groups, so
what counts is derived from the step and from what is alive; there is no counter to go wrong.
"""

from services.scheduler.rules import Rules


def groups_counted(rules: Rules, *, step: int, alive: int) -> int:
    """Groups that count: those trained by `step` steps, and those running, ready or taken."""
    return step * rules.groups_per_step + alive


def groups_allowed(rules: Rules, *, step: int) -> int:
    """Groups that may count after `step` optimizer steps; never more than the run can train."""
    steps = min(step + rules.max_staleness_steps + 1, rules.max_steps)
    return steps * rules.groups_per_step


def groups_admissible(rules: Rules, *, step: int, alive: int, tasks_left: int) -> int:
    """Groups that may be admitted now, out of `tasks_left` tasks that wait for one."""
    assert tasks_left >= 0
    counted = groups_counted(rules, step=step, alive=alive)
    return max(0, min(groups_allowed(rules, step=step) - counted, tasks_left))


def oldest_step_allowed(rules: Rules, *, step: int, rank: int) -> int:
    """Age limit of the weights with which a trajectory may begin, as the step they have seen.

    The group that is `rank`-th in line (1-based) is trained within ceil(rank / groups_per_step)
    steps from now at the latest. Beginning with these weights or newer ones keeps it within
    `max_staleness_steps` even then.
    """
    assert rank >= 1
    steps_until_trained = -(-rank // rules.groups_per_step)
    return max(0, step + steps_until_trained - 1 - rules.max_staleness_steps)
