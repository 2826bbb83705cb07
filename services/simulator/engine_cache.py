"""The KV cache of a simulated engine: what running requests hold, and what is kept besides.

Counted in tokens. A trajectory's own context stays cached while its tool runs, and the prompt of
a group is there once for all its members; both give way, least recently used first, to what
running requests need. A prompt goes only after all contexts that build on it.

A prompt counts as cached from the moment its first request is admitted: requests are computed in
order of admission, so it is there before anyone behind could read it.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """The prompt of one group."""

    group_id: str
    tokens: int
    running: int = 0
    """Requests that read it now."""
    idle: int = 0
    """Cached contexts that continue it."""
    live: bool = True
    """New requests may share it; not after new weights."""


@dataclass(slots=True, eq=False)
class CachedContext:
    """What a trajectory without a running request left."""

    trajectory_id: str
    prompt: CachedPrompt | None
    own_tokens: int
    """After the prompt, if that is shared."""


@dataclass(slots=True, eq=False)
class Claim:
    """What one running request holds."""

    prompt: CachedPrompt | None
    own_tokens: int
    """After the prompt, if that is shared; grows as they are computed."""
    prompt_tokens: int
    """Of the prompt, if that is shared."""
    cached_tokens: int
    """Of its context, at admission: they need not be computed."""

    @property
    def held_tokens(self) -> int:
        """KV tokens, its prompt's included."""
        return self.own_tokens + self.prompt_tokens


class KvCache:
    """Tokens in use, tokens kept, and who may have what."""

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.used = 0
        """Held by running requests."""
        self.kept = 0
        """Held by nobody, evictable."""
        self._prompts: dict[str, CachedPrompt] = {}
        self._contexts: dict[str, CachedContext] = {}
        self._evictable: OrderedDict[CachedContext | CachedPrompt, None] = OrderedDict()
        """Least recently used first."""

    def offer(
        self, trajectory_id: str, group_id: str, context_tokens: int, prompt_tokens: int
    ) -> tuple[int, int]:
        """What a claim of this context would find.

        Returns:
            How much of the context is cached, and by how much `used` would grow at once.
        """
        context = self._contexts.get(trajectory_id)
        prompt = context.prompt if context else self._prompts.get(group_id)
        if prompt is not None and prompt.tokens > context_tokens:
            return 0, 0
        shared = prompt.tokens if prompt else 0
        own = context.own_tokens if context else 0
        cached = min(shared + own, context_tokens - 1)
        if prompt is None and context is None and group_id not in self._prompts:
            return 0, prompt_tokens
        held = min(own, context_tokens - shared)
        return cached, held + (0 if prompt and prompt.running else shared)

    def kept_for(self, trajectory_id: str) -> int:
        """Tokens kept of a trajectory's context, its prompt included; 0 when it was evicted."""
        context = self._contexts.get(trajectory_id)
        if context is None:
            return 0
        return context.own_tokens + (context.prompt.tokens if context.prompt else 0)

    def claim(
        self, trajectory_id: str, group_id: str, context_tokens: int, prompt_tokens: int
    ) -> Claim:
        """Give a request what is cached of its context, and room for its prompt.

        What that needs must fit; others' leftovers give way. The rest it gets by `grow`.
        """
        context = self._contexts.pop(trajectory_id, None)
        if context is not None:
            prompt = context.prompt
            del self._evictable[context]
            self.kept -= context.own_tokens
            cached = context.own_tokens
            if prompt is not None:
                prompt.idle -= 1
                cached += prompt.tokens
        else:
            prompt = self._prompts.get(group_id)
            cached = prompt.tokens if prompt else 0
        if prompt is not None and prompt.tokens > context_tokens:
            self._settle(prompt)
            prompt, cached, context = None, 0, None
        if prompt is None and context is None and group_id not in self._prompts:
            prompt = self._prompts[group_id] = CachedPrompt(group_id, prompt_tokens)
            self.kept += prompt_tokens
        self._hold(prompt)
        shared = prompt.tokens if prompt is not None else 0
        own = min(context.own_tokens, context_tokens - shared) if context is not None else 0
        self.grow(own)
        return Claim(prompt, own, shared, min(cached, context_tokens - 1))

    def grow(self, tokens: int) -> None:
        """Running requests need so many tokens more, which must fit."""
        self.used += tokens
        assert self.used <= self.kv_tokens, (self.used, self.kv_tokens)
        while self.used + self.kept > self.kv_tokens:
            self._evict()

    def release(self, claim: Claim, *, keep_for: str = "") -> None:
        """A request ended. Its context is kept for that trajectory, unless its prompt is stale."""
        prompt = claim.prompt
        self.used -= claim.own_tokens
        keep = bool(keep_for) and (prompt is None or prompt.live)
        if keep:
            context = CachedContext(keep_for, prompt, claim.own_tokens)
            self._contexts[keep_for] = context
            self._evictable[context] = None
            self.kept += claim.own_tokens
            if prompt is not None:
                prompt.idle += 1
        if prompt is None:
            return
        prompt.running -= 1
        if not prompt.running:
            self.used -= prompt.tokens
            if prompt.live:
                self.kept += prompt.tokens
        self._settle(prompt)

    def arrive(self, trajectory_id: str, group_id: str, context_tokens: int) -> None:
        """A context came from another worker. Dropped when running requests leave no room."""
        self.forget(trajectory_id)
        prompt = self._prompts.get(group_id)
        if prompt is not None and prompt.tokens > context_tokens:
            prompt = None
        own = context_tokens - (prompt.tokens if prompt else 0)
        idle_prompt = prompt.tokens if prompt and not prompt.running else 0
        if self.used + own + idle_prompt > self.kv_tokens:
            return
        context = CachedContext(trajectory_id, prompt, own)
        if prompt is not None:
            prompt.idle += 1
            self._evictable.pop(prompt, None)
        self._contexts[trajectory_id] = context
        self._evictable[context] = None
        self.kept += own
        self.grow(0)

    def forget(self, trajectory_id: str) -> None:
        """Free what is kept for a trajectory."""
        context = self._contexts.pop(trajectory_id, None)
        if context is None:
            return
        del self._evictable[context]
        self._drop(context)

    def invalidate(self) -> None:
        """New weights: nothing computed before is shared or continued by later requests."""
        for prompt in self._prompts.values():
            prompt.live = False
            prompt.idle = 0
        self._prompts.clear()
        self._contexts.clear()
        self._evictable.clear()
        self.kept = 0

    def _hold(self, prompt: CachedPrompt | None) -> None:
        if prompt is None:
            return
        self._evictable.pop(prompt, None)
        if not prompt.running:
            self.kept -= prompt.tokens
            self.used += prompt.tokens
        prompt.running += 1

    def _settle(self, prompt: CachedPrompt, *, oldest: bool = False) -> None:
        """The prompt may have become evictable."""
        if not prompt.live or prompt.running or prompt.idle:
            return
        self._evictable[prompt] = None
        if oldest:
            self._evictable.move_to_end(prompt, last=False)

    def _evict(self) -> None:
        entry, _ = self._evictable.popitem(last=False)
        if isinstance(entry, CachedPrompt):
            self.kept -= entry.tokens
            del self._prompts[entry.group_id]
            entry.live = False
            return
        del self._contexts[entry.trajectory_id]
        self._drop(entry, oldest=True)

    def _drop(self, context: CachedContext, *, oldest: bool = False) -> None:
        self.kept -= context.own_tokens
        if context.prompt is not None:
            context.prompt.idle -= 1
            self._settle(context.prompt, oldest=oldest)
