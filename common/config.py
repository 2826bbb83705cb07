"""The configuration: one TOML file, one frozen model, one loader.

Every key is declared here, with its unit and default; anything else is refused with its file
and line. `load` is the only way from a file to a `Config`, for every command and service.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]


class Section(BaseModel):
    """A table of the file: frozen, every key known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunConfig(Section):
    """What the run is called and when it ends."""

    name: Name
    """Names the run directory."""
    directory: str = "runs"
    """Where run directories are made, relative to the working directory."""
    seed: int = 0
    """Of everything random: task order, sampling, initial weights of new parameters."""
    max_steps: Count
    """Optimizer steps; the run also ends when all epochs are trained."""
    failed_groups_max: Count = 8
    """The run stops when so many groups in a row were dropped because they failed."""


class ModelConfig(Section):
    """The policy."""

    path: str
    """A directory that transformers loads as a causal LM, with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rollout engines and of published versions. The trainer keeps float32 weights."""
    context_tokens: Count
    """Prompt plus everything after it; bounded by what the model supports."""


class TasksConfig(Section):
    """What the policy is trained on."""

    path: str
    """A JSONL file; each row is one task."""
    id_column: str = "task_id"
    environment_column: str = "environment"
    """Column that names the environment of the row."""
    epochs: Count = 1


class SamplingConfig(Section):
    """How trajectories are sampled. top-p, top-k and min-p do not exist here on purpose: they
    renormalise the sampling distribution, and the loss would be biased by the cut mass."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Applied in the engine and in the trainer's log-probabilities alike."""
    turns_max: Count = 4
    turn_tokens_max: Count = 64
    """Tokens sampled in one turn."""
    trajectory_tokens_max: Count = 256
    """Tokens sampled in all turns together."""


class RolloutConfig(Section):
    """How the rollout workers work."""

    tool_format: Literal["tags", "hermes"] = "hermes"
    """How the model writes tool calls: `<tool>…</tool>` tags, or Hermes/Qwen `<tool_call>`
    JSON."""
    on_weight_update: Literal["keep"] = "keep"
    """Trajectories in flight go on with the new weights."""
    tool_timeout_s: Seconds = 10.0
    """Wall-clock limit of one tool call; past it the model sees a time-out."""
    grade_timeout_s: Seconds = 30.0
    start_timeout_s: Seconds = 300.0
    """An engine that is not ready by then ends the run with its last log line."""


class BucketConfig(Section):
    """A class of rollout workers with one parallelism configuration."""

    name: Name
    engine: Literal["auto", "vllm", "torch", "fake"] = "auto"
    """`auto` takes vLLM where it can be imported, else torch."""
    workers: Count = 1
    tensor_parallel: Count = 1
    slots: Count = 32
    """Trajectories that one worker holds at once."""
    kv_tokens: Count = 32768
    """KV-cache budget of one worker, in tokens."""
    cpus: list[list[int]] = []
    """Without GPUs: the cores of each worker; empty lets the launcher spread them."""


class SchedulerConfig(Section):
    """Admission and placement."""

    max_staleness_steps: Annotated[int, Field(ge=0)] = 1
    """A batch may be trained at most so many steps after its oldest token was sampled."""
    placement: Literal["least_load"] = "least_load"
    placements_max: Count = 5
    """A trajectory that lost so many workers is given up as a failure."""
    attempts_max: Count = 3
    """A task whose groups failed so often is parked."""
    lease_s: Seconds = 5.0
    """A trajectory that its worker does not report for so long is placed again."""


class TrainingConfig(Section):
    """The optimizer step."""

    groups_per_step: Count = 8
    group_size: Count = 8
    """Trajectories per task and group."""
    group_usable_min: Count = 2
    """A group with fewer usable trajectories is dropped."""
    zero_variance: Literal["filter", "keep"] = "filter"
    """Groups whose rewards are all equal have no gradient: replace them, or keep them in the
    batch as they are."""
    baseline: Literal["group", "none"] = "group"
    normalise_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False is Dr. GRPO."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio between proximal and behaviour policy."""
    loss_average: Literal["token", "sequence"] = "token"
    grad_norm_max: Annotated[float, Field(gt=0)] = 1.0
    minibatches: Count = 1
    """Optimizer updates per step; the batch is split evenly over them."""
    micro_batch_tokens: Count = 16384
    """Tokens packed into one forward pass."""
    nonfinite_steps_max: Count = 3
    """The run stops when so many steps in a row have a non-finite loss or gradient."""
    ranks: Count = 1
    """Data-parallel ranks (FSDP2)."""
    threads: Count = 1
    """CPU threads of each rank."""
    checkpoint_every_steps: Count = 10
    checkpoints_kept: Count = 2


class ToolServerConfig(Section):
    """One tool server process."""

    name: Name
    target: str
    """Python module (`package.module`) or file (`path/to/server.py`) with tools and
    environments."""
    capacity: Count = 64
    """Sessions open at once."""
    session_ttl_s: Seconds = 120.0
    unsafe: bool = False
    """Let model-written code run without a sandbox. Only for code you wrote yourself."""


class CoordinatorConfig(Section):
    """Membership and versions."""

    address: str = "tcp://127.0.0.1:0"
    """Where the coordinator listens; port 0 takes a free one and publishes it in the run
    directory."""
    lease_s: Seconds = 3.0
    """A member that is silent for so long is gone."""
    apply_timeout_s: Seconds = 60.0
    """A worker that has not applied a version by then is dropped from the run."""


class Config(Section):
    """One job."""

    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    buckets: Annotated[list[BucketConfig], Field(min_length=1)]
    scheduler: SchedulerConfig = SchedulerConfig()
    training: TrainingConfig = TrainingConfig()
    tools: Annotated[list[ToolServerConfig], Field(min_length=1)]
    coordinator: CoordinatorConfig = CoordinatorConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        return self
