"""The configuration: one TOML file, one frozen model, one loader.

Every key is declared here, with its unit and default; anything else is refused with its file
and line. `common.config_load.load_config` is the only way from a file to a `Config`, for every
command and service; which values go together is decided in `common.config_combine`. The string
under a field is its documentation in docs/CONFIG.md. Environment variables configure nothing.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

INT_MAX = 2**31 - 1
"""Every integer travels in messages and lies in the ledger; none needs more than 31 bits."""

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Count = Annotated[int, Field(ge=1, le=INT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=INT_MAX)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
Text = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: frozen, every key known, no value converted."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    """What the run is called and when it ends."""

    name: Name
    """Names the run directory."""
    directory: Text = "runs"
    """Where run directories are made, relative to the working directory."""
    seed: CountOrZero = 0
    """Of everything random: task order, sampling, initial weights of new parameters."""
    max_steps: Count
    """Optimizer steps; the run also ends when all epochs are trained."""
    failed_groups_max: Count = 8
    """The run stops when so many groups in a row were dropped because they failed. Groups that were
    under way together count once."""


class ModelConfig(Section):
    """The policy."""

    path: Text
    """A directory, relative to the working directory, that transformers loads as a causal LM,
    with its tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rollout engines and of published versions. The trainer keeps float32 weights."""
    context_tokens: Count
    """Prompt plus everything after it; bounded by what the model supports."""


class TasksConfig(Section):
    """What the policy is trained on."""

    path: Text
    """A JSONL file, relative to the working directory; each row is one task."""
    id_column: Text = "task_id"
    """Column that holds the row's id, unique in the file."""
    environment_column: Text = "environment"
    """Column that names the environment of the row."""
    epochs: Count = 1
    """How often each task is trained."""


class SamplingConfig(Section):
    """How trajectories are sampled.

    top-p, top-k and min-p do not exist here on purpose: they renormalise the sampling
    distribution, and the loss would be biased by the cut mass.
    """

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Applied in the engine and in the trainer's log-probabilities alike."""
    turns_max: Count = 4
    """Turns of one trajectory."""
    turn_tokens_max: Count = 64
    """Tokens sampled in one turn."""
    trajectory_tokens_max: Count = 256
    """Tokens sampled in all turns together."""


class RolloutConfig(Section):
    """How the rollout workers work."""

    tool_format: Literal["tags", "hermes"] = "hermes"
    """How the model writes tool calls: `<tool>…</tool>` tags, or Hermes/Qwen `<tool_call>`
    JSON."""
    tool_timeout_s: Seconds = 10.0
    """Wall-clock limit of one tool call; past it the model sees a time-out."""
    grade_timeout_s: Seconds = 30.0
    """Wall-clock limit of grading one trajectory; past it the trajectory counts as failed by
    us, not as a wrong answer."""
    start_timeout_s: Seconds = 300.0
    """An engine that is not ready by then ends the run with its last log line."""
    on_weight_update: Literal["keep", "abort", "wait"] = "keep"
    """What becomes of turns that are being sampled when new weights arrive. `keep`: they go on, and
    each token carries its version. `abort`: they are sampled anew from their first token. `wait`:
    they are finished first, and no other turn begins meanwhile; what takes longer than a quarter of
    `coordinator.apply_timeout_s` is sampled anew. With the last two no turn mixes versions."""


class BucketConfig(Section):
    """A class of rollout workers with one parallelism configuration."""

    name: Name
    """Names the bucket; its workers are called `NAME-0`, `NAME-1`, …"""
    engine: Literal["auto", "vllm", "torch", "fake"] = "auto"
    """`auto` takes vLLM where it can be imported, else torch."""
    workers: Count = 1
    """Rollout worker processes."""
    tensor_parallel: Count = 1
    """Devices (without GPUs: cores) over which vLLM splits one worker's model; its attention heads
    and its feed-forward width must divide by it. Only vLLM can."""
    slots: Count = 32
    """Trajectories that one worker holds at once."""
    kv_tokens: Count = 32768
    """KV-cache budget of one worker, in tokens; at least `model.context_tokens`."""
    context_tokens_max: CountOrZero = 0
    """The bucket is meant for trajectories that end with at most so long a context; 0 means no
    bound. `libra` weighs costs and needs no bound; the other bucket policies route by it. Buckets
    are listed by rising bound, and one must reach `model.context_tokens`."""
    hybrid: bool = False
    """Its workers can change sides: each shares its devices with a trainer replica, and exactly one
    of the two is awake."""
    cpus: list[Annotated[list[CountOrZero], Field(min_length=1)]] = []
    """Without GPUs: the cores of each worker; empty lets the launcher spread them."""


class SchedulerConfig(Section):
    """Admission and placement."""

    max_staleness_steps: CountOrZero = 1
    """A batch may be trained at most so many steps after its oldest token was sampled."""
    placement: Literal[
        "libra",
        "cmlfq",
        "la_mlfq",
        "length_aware",
        "mlfq",
        "least_load",
        "round_robin",
    ] = "libra"
    """How a worker is chosen. `libra`: least expected cost, and a move at a tool return where that
    saves enough. `cmlfq`: the published prefix tree, as printed. `la_mlfq`: the same, but it starts
    in the bucket of the expected length. `length_aware`: by expected length at the start, never
    moved. `mlfq`: by present length. `least_load`, `round_robin`: what they say, never moved."""
    payload_small_max: Count = 500
    """Tool returns of at most so many tokens are small."""
    payload_medium_max: Count = 5000
    """Tool returns of at most so many tokens are medium; others are large."""
    moves_max: CountOrZero = 4
    """Moves of one trajectory for balance; those from a draining or lost worker do not count."""
    move_saving_min: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """A move must save this share of the expected time to the trajectory's end."""
    kv_high: Annotated[float, Field(gt=0, le=4)] = 0.95
    """A worker gets nothing new once this share of its KV cache is used or spoken for…"""
    kv_low: Annotated[float, Field(gt=0, le=4)] = 0.85
    """…until the share has fallen to this one."""
    placements_max: Count = 5
    """A trajectory that lost so many workers is given up as a failure."""
    attempts_max: Count = 3
    """A task whose groups failed so often is parked."""
    lease_s: Seconds = 5.0
    """A trajectory that its worker does not report for so long is placed again."""
    turn_timeout_s: Seconds = 600.0
    """A trajectory that finishes no turn for so long, though its worker reports it, is placed
    again. Longer than any turn with its tool call and grading."""


class TrainingConfig(Section):
    """The optimizer step."""

    groups_per_step: Count = 8
    """Groups that one optimizer step consumes."""
    group_size: Count = 8
    """Trajectories per task and group."""
    group_usable_min: Count = 2
    """A group with fewer usable trajectories is dropped."""
    zero_variance: Literal["filter", "keep"] = "filter"
    """Groups whose rewards are all equal have no gradient under a group baseline: replace them,
    or keep them in the batch as they are."""
    baseline: Literal["group", "none"] = "group"
    """What is subtracted from a reward: the mean of its group, or nothing."""
    normalise_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False is Dr. GRPO."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Of AdamW, after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW."""
    betas: Annotated[tuple[Decay, Decay], Strict(strict=False)] = (0.9, 0.95)
    """Of AdamW."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The policy ratio is clipped below `1 - clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The policy ratio is clipped above `1 + clip_high`."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio between proximal and behaviour policy."""
    loss_average: Literal["token", "sequence"] = "token"
    """Whether every action token of the batch weighs the same, or every trajectory."""
    grad_norm_max: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    minibatches: Count = 1
    """Optimizer updates per step; the batch is split evenly over them."""
    micro_batch_tokens: Count = 16384
    """Tokens packed into one forward pass."""
    nonfinite_steps_max: Count = 3
    """The run stops when so many steps in a row have a non-finite loss or gradient."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass. Weights, gradient sums and optimizer stay float32. On a
    CPU with bfloat16 instructions it halves the time of a model of 100 million parameters."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which replicas return gradient sums. bfloat16 halves the traffic; what rounding takes away
    is added to the replica's next sum."""
    ranks: Count = 1
    """Data-parallel ranks (FSDP2)."""
    threads: Count = 1
    """CPU threads of each rank."""
    checkpoint_every_steps: Count = 10
    """Steps between two checkpoints; the last step always makes one."""
    checkpoints_kept: Count = 2
    """Older checkpoints are deleted."""


class ToolServerConfig(Section):
    """One tool server process."""

    name: Name
    """Names the server in logs and metrics."""
    target: Text
    """Python module (`package.module`) or file (`path/to/server.py`) with tools and
    environments."""
    capacity: Count = 64
    """Sessions open at once."""
    session_ttl_s: Seconds = 120.0
    """A session that nothing touches for so long is closed."""
    unsafe: bool = False
    """Let model-written code run without a sandbox. Only for code you wrote yourself."""


class CoordinatorConfig(Section):
    """Membership and versions."""

    address: Text = "tcp://127.0.0.1:0"
    """Where the coordinator listens; port 0 takes a free one and publishes it in the run
    directory."""
    lease_s: Seconds = 3.0
    """A member that is silent for so long is gone."""
    apply_timeout_s: Seconds = 60.0
    """A worker that has not fetched or applied a version by then is dropped from the run."""
    decode_share_min: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the rollout workers that go on decoding while others swap weights; with few workers
    still one swaps at a time."""
    stream_bytes_per_s_max: CountOrZero = 0
    """Upper bound of what one receiver on another host takes in, in bytes per second; 0: none."""


class ElasticConfig(Section):
    """Who changes sides, and when."""

    planner: bool = True
    """Let the scheduler choose how many hybrid slots train; else only `libra scale` does."""
    train_slots: CountOrZero = 0
    """Hybrid slots that train at the start."""
    drain_timeout_s: Seconds = 10.0
    """What a tenant has not finished or handed back so long after it was told to yield is given
    up, and done again elsewhere."""
    hold_steps: Count = 4
    """Steps between two changes of the split by the planner."""
    gain_min: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """A change must shorten the step by this share."""


class Config(Section):
    """One job."""

    run: RunConfig
    """What the run is called and when it ends."""
    model: ModelConfig
    """The policy."""
    tasks: TasksConfig
    """What the policy is trained on."""
    sampling: SamplingConfig = SamplingConfig()
    """How trajectories are sampled."""
    rollout: RolloutConfig = RolloutConfig()
    """How the rollout workers work."""
    buckets: Annotated[list[BucketConfig], Field(min_length=1)]
    """The rollout workers, by class."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Admission and placement."""
    training: TrainingConfig = TrainingConfig()
    """The optimizer step."""
    tools: Annotated[list[ToolServerConfig], Field(min_length=1)]
    """The tool servers."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """Membership and versions."""
    elastic: ElasticConfig = ElasticConfig()
    """Who changes sides, and when."""
