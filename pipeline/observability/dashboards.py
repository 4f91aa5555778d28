"""The four dashboards: serving, rollouts, weights, and the bus with its ledger.

Keeps true
- A fleet is shown as its mean and its worst member: the mean of a hundred engines hides one engine that is stalled.
- A query uses only metrics of the table, and selects no run: the reader selects it with the variable `$job`.
"""

from rose.pipeline.observability.grafana import (
    CONTROL,
    LENDER,
    RATE,
    SCRAPED,
    Dashboard,
    Panel,
    each_mean,
    mean_and_worst,
    quantiles,
    rate_by,
)

SERVING = Dashboard(
    "serving",
    "ROSE: serving under lending",
    [
        Panel(
            "Time to first token of serving",
            "Latency of users, from vLLM's own metrics, without guests. Compare it with lender.promise.",
            "s",
            quantiles("vllm:time_to_first_token_seconds"),
            SCRAPED,
        ),
        Panel(
            "Time between tokens of serving",
            "Latency of the same users.",
            "s",
            quantiles("vllm:inter_token_latency_seconds"),
            SCRAPED,
        ),
        Panel(
            "Serving's requests",
            "Requests of users at lending servers. A waiting request holds every guest back.",
            "short",
            {
                "running, mean": 'avg(rose_lender_serving_requests{state="running"} >= 0)',
                "running, most": 'max(rose_lender_serving_requests{state="running"} >= 0)',
                "waiting, most": 'max(rose_lender_serving_requests{state="waiting"} >= 0)',
            },
            LENDER,
        ),
        Panel(
            "Slack of serving's steps",
            "Time that the promise left at the last check of serving. Below 0 the promise was broken.",
            "s",
            {
                "prefill, least": f'min(min_over_time(rose_lender_headroom_seconds{{kind="prefill"}}[{RATE}]))',
                "decode, least": f'min(min_over_time(rose_lender_headroom_seconds{{kind="decode"}}[{RATE}]))',
            },
            f"{LENDER} with requests of users",
        ),
        Panel(
            "Longest piece of a guest's work",
            "Time that serving may have to wait for a guest; the yield bound limits it.",
            "s",
            quantiles("rose_lender_guest_piece_seconds"),
            LENDER,
        ),
        Panel(
            "Why guests did not compute",
            "Times a second that a guest with work was held back, by the reason in serving.",
            "ops",
            rate_by("why", "rose_lender_held_back_total"),
            LENDER,
        ),
        Panel(
            "Memory lent",
            "KV memory that rollout turns may hold; 0 where a guest is parked.",
            "bytes",
            mean_and_worst("rose_lender_budget_bytes", worst="min"),
            LENDER,
        ),
        Panel(
            "Cuts and frozen lenders",
            "A cut takes half of the lent memory back. The budget is frozen until the next version or for some time.",
            "short",
            {
                "cuts a minute": f"60 * sum(rate(rose_lender_cuts_total[{RATE}]))",
                "turns given up a minute": f"60 * sum(rate(rose_lender_preempted_total[{RATE}]))",
                "frozen": "sum(rose_lender_frozen)",
            },
            LENDER,
        ),
        Panel(
            "Time taken from serving's loop",
            "Share of the server's time in which KV memory is divided between serving and guest.",
            "percentunit",
            mean_and_worst(f"rate(rose_lender_look_seconds_total[{RATE}])"),
            LENDER,
        ),
        Panel(
            "How wrong predictions are",
            "Share by which one step in ten takes longer or shorter than predicted. Large errors cost slack.",
            "percentunit",
            {"{{step}}, worst": "max by (step) (rose_lender_prediction_error_ratio)"},
            LENDER,
        ),
        Panel(
            "Who is to lend, and where",
            "Lenders by decision of the control app, including manual grants, and lenders on the way to another "
            "cell. If wakes and parks, or moves, continue without end, look at the page of the control app.",
            "short",
            {
                "{{told}}": "sum by (told) (rose_control_lenders)",
                "woken a minute": f"60 * sum(rate(rose_control_woken_total[{RATE}]))",
                "parked a minute": f"60 * sum(rate(rose_control_parked_total[{RATE}]))",
                "moved a minute": f"60 * sum(rate(rose_control_moved_total[{RATE}]))",
                "on the way to another cell": "sum(rose_control_moving)",
            },
            CONTROL,
        ),
        Panel(
            "Work that waits for capacity",
            "Time that the open executors of a cell need for the waiting turns, in the worst cell.",
            "s",
            {"waiting": "max(rose_control_waiting_seconds)"},
            CONTROL,
        ),
        Panel(
            "Share of turns done by lenders",
            "Share of the sampled tokens that lenders sampled.",
            "percentunit",
            {
                "share": f'sum(rate(rose_executor_tokens_total{{kind="sampled"}}[{RATE}]) '
                f"and on (instance) rose_lender_budget_bytes) "
                f'/ sum(rate(rose_executor_tokens_total{{kind="sampled"}}[{RATE}]))'
            },
            LENDER,
        ),
    ],
)


ROLLOUT = Dashboard(
    "rollout",
    "ROSE: rollout",
    [
        Panel(
            "Turns",
            "Requested and finished turns. A requested turn that is neither done nor given up waits or runs.",
            "ops",
            {
                "asked for": f"sum(rate(rose_router_turns_requested_total[{RATE}]))",
                "done": f"sum(rate(rose_router_turns_finished_total[{RATE}]))",
                "given up": f"sum(rate(rose_router_turns_failed_total[{RATE}]))",
                "waited again": f"sum(rate(rose_router_turns_reissued_total[{RATE}]))",
            },
        ),
        Panel(
            "Turns under way",
            "Turns that wait, and turns at executors. If many wait and few are at executors, the fleet refuses turns.",
            "short",
            {"waiting": "sum(rose_router_waiting_turns)", "with executors": "sum(rose_router_outstanding_turns)"},
        ),
        Panel(
            "Wait for room",
            "Time from the request of a turn, or its reissue, to the dispatch.",
            "s",
            {**quantiles("rose_router_dispatch_seconds"), "oldest": "max(rose_router_oldest_waiting_seconds)"},
        ),
        Panel(
            "A turn on its executor",
            "Time from the inbox to the last token: the mean of all executors, and of the slowest executor.",
            "s",
            mean_and_worst(each_mean("rose_executor_turn_seconds")),
        ),
        Panel(
            "Tokens of an executor",
            "Sampled tokens a second: the mean of all executors, and the slowest executor.",
            "short",
            mean_and_worst(f'rate(rose_executor_tokens_total{{kind="sampled"}}[{RATE}])', worst="min"),
        ),
        Panel(
            "Prefix cache",
            "Cached tokens of the context, for each token sampled.",
            "short",
            {
                "cached for each sampled": f'sum(rate(rose_executor_tokens_total{{kind="cached"}}[{RATE}])) '
                f'/ sum(rate(rose_executor_tokens_total{{kind="sampled"}}[{RATE}]))'
            },
        ),
        Panel(
            "KV cache in use",
            "Share of the KV memory that rollouts may hold. Turns wait at a full executor.",
            "percentunit",
            mean_and_worst("1 - rose_executor_kv_free_bytes / (rose_executor_kv_capacity_bytes > 0)"),
        ),
        Panel(
            "Turns held",
            "Turns at an executor: the mean, and the most.",
            "short",
            mean_and_worst("rose_executor_held_turns"),
        ),
        Panel(
            "How attempts ended",
            "Attempts by outcome. Dropped dispatches were for another incarnation, or had an older fencing token.",
            "ops",
            rate_by("outcome", "rose_executor_turns_total"),
        ),
        Panel(
            "Executors",
            "Executors by status: stale executors have not proven the current version, gone executors are silent.",
            "short",
            {"{{standing}}": "sum by (standing) (rose_router_executors)"},
        ),
        Panel(
            "A step of an environment",
            "Time of a step itself. Long steps delay the next turn of a trajectory.",
            "s",
            quantiles("rose_environment_step_seconds"),
        ),
        Panel(
            "Trajectories",
            "Open trajectories, and the environments that are held for them.",
            "short",
            {
                "open": "sum(rose_environment_trajectories)",
                "live environments": "sum(rose_environment_live_environments)",
                "groups not settled": "sum(rose_environment_unsettled_groups)",
            },
        ),
        Panel(
            "How trajectories end",
            "Trajectories by ending. Failed trajectories are failures of infrastructure or environment.",
            "ops",
            rate_by("ending", "rose_environment_trajectories_ended_total"),
        ),
    ],
)


WEIGHTS = Dashboard(
    "weights",
    "ROSE: training and weights",
    [
        Panel(
            "Where a step's time goes",
            "Long waits for a batch: rollouts are too slow. Long waits for the policy: publishing is too slow.",
            "s",
            {
                "waiting for the batch": each_mean("rose_trainer_batch_wait_seconds"),
                "waiting for the policy": each_mean("rose_trainer_policy_wait_seconds"),
                "training": each_mean("rose_trainer_training_seconds"),
                "waiting for an evaluation": each_mean("rose_trainer_evaluation_wait_seconds"),
                "checkpoint": each_mean("rose_trainer_checkpoint_seconds"),
            },
        ),
        Panel(
            "Gradients computed while groups are awaited",
            "Share of the trained tokens whose gradient was computed before the last group of their step was complete "
            "(trainer.stream_gradients), and tokens of the step to come.",
            "short",
            {
                "share of tokens": f"rate(rose_trainer_streamed_tokens_total[{RATE}]) "
                f"/ rate(rose_trainer_tokens_total[{RATE}])",
                "tokens of the step to come": "rose_trainer_early_tokens",
            },
        ),
        Panel(
            "Reward and success",
            "Reward and success in the latest step.",
            "short",
            {"reward": "rose_trainer_reward_mean", "success": "rose_trainer_success_ratio"},
        ),
        Panel(
            "Evaluations",
            "Scores of the latest complete evaluation, on prompts that are never trained on, and the best so far.",
            "short",
            {
                "avg@k": "rose_evaluator_success_ratio",
                "pass@k": "rose_evaluator_pass_ratio",
                "reward": "rose_evaluator_reward_mean",
                "best": "rose_evaluator_best_score",
            },
        ),
        Panel(
            "Samples of evaluations",
            "Samples by whether they count: others are of another version than the pinned one, or have failed.",
            "short",
            {
                "{{taken}}": "sum by (taken) (rose_evaluator_samples_total)",
                "prompts left": "rose_evaluator_prompts_left",
            },
        ),
        Panel(
            "Drift of logprobs",
            "Difference per token between trainer and engine. It grows with staleness. The KL of equal weights does "
            "not: it means that the two compute different models.",
            "short",
            {
                "KL, nats": "rose_trainer_behaviour_kl_nats",
                "KL of equal weights, nats": "rose_trainer_mismatch_kl_nats",
                "|1 - ratio|": "abs(1 - rose_trainer_importance_mean_ratio)",
            },
        ),
        Panel(
            "Staleness",
            "Age, in versions, of the samples of the latest step.",
            "short",
            {
                "mean": "rose_trainer_staleness_versions",
                "mean of tokens": "rose_trainer_token_staleness_versions",
                "worst": "rose_trainer_staleness_max_versions",
            },
        ),
        Panel(
            "Entropy",
            "Entropy of the policies that sampled the latest step, and how far the policy has left the model folder's.",
            "short",
            {"entropy, nats": "rose_trainer_entropy_nats", "KL to the start, nats": "rose_trainer_reference_kl_nats"},
        ),
        Panel(
            "Tokens without a gradient",
            "Shares of the latest step's tokens: clipped or rejected ones by the sign of their advantage, and those "
            "rejected by their ratio of trainer to engine.",
            "percentunit",
            {
                "{{advantage}}": "rose_trainer_clipped_sign_ratio",
                "rejected by ratio": "rose_trainer_rejected_ratio",
            },
        ),
        Panel(
            "Samples that teach little",
            "Shares of the latest step's samples. An advantage of 0 is that of a group with equal rewards.",
            "percentunit",
            {
                "advantage of 0": "rose_trainer_zero_advantage_ratio",
                "cut off": "rose_trainer_truncated_ratio",
            },
        ),
        Panel(
            "Gradient",
            "Norm, share of clipped tokens, and minibatches of five minutes that were skipped as not finite.",
            "short",
            {
                "norm": "rose_trainer_gradient_norm",
                "clipped share": "rose_trainer_clipped_ratio",
                "skipped": "increase(rose_trainer_skipped_minibatches_total[5m])",
            },
        ),
        Panel(
            "Versions behind",
            "Versions that engines are behind the newest version on the log: the mean, and the worst.",
            "short",
            mean_and_worst(
                "max by (job) (rose_trainer_policy_version) "
                "- on (job) group_right () (rose_executor_policy_version >= 0)"
            ),
        ),
        Panel(
            "Publishing a version",
            "Time to encode and store the chunks of a version.",
            "s",
            quantiles("rose_weights_publish_seconds"),
        ),
        Panel(
            "Receiving a version",
            "Time to fetch, decode and verify a version: the mean of all receivers, and of the slowest receiver.",
            "s",
            mean_and_worst(each_mean("rose_weights_receive_seconds")),
        ),
        Panel(
            "The pause for a version",
            "Time in which an engine computes nothing while it activates a version.",
            "s",
            mean_and_worst(each_mean("rose_executor_swap_seconds")),
        ),
        Panel(
            "Bytes of weights",
            "Bytes published, the size of the same versions without encoding, and the bytes that all receivers read.",
            "Bps",
            {
                "published": f"sum(rate(rose_weights_published_bytes_total[{RATE}]))",
                "stand for": f"sum(rate(rose_weights_dense_bytes_total[{RATE}]))",
                "received": f"sum(rate(rose_weights_received_bytes_total[{RATE}]))",
            },
        ),
        Panel(
            "Versions refused",
            "Versions refused by receivers, by reason, and staged versions refused by engines. Look at each refusal.",
            "short",
            {
                "{{reason}}": "sum by (reason) (increase(rose_weights_refused_total[5m]))",
                "by the engine": "sum(increase(rose_executor_swaps_refused_total[5m]))",
            },
        ),
    ],
)


BUS = Dashboard(
    "bus",
    "ROSE: bus and ledger",
    [
        Panel(
            "Records written",
            "Records that the broker has stored, by topic.",
            "ops",
            rate_by("topic", "rose_bus_written_records_total"),
        ),
        Panel(
            "Records read",
            "Records that all readers have read, by topic.",
            "ops",
            rate_by("topic", "rose_bus_read_records_total"),
        ),
        Panel(
            "Dead letters",
            "Dead letters within five minutes, by topic. `rose dlq list` lists them with reasons.",
            "short",
            {"{{topic}}": "sum by (topic) (increase(rose_bus_dead_letters_total[5m]))"},
        ),
        Panel(
            "Ledger",
            "Opened trajectories and outcomes since these processes started. A trajectory without an outcome is in "
            "flight. `rose audit` proves the balance from the log.",
            "short",
            {
                "opened": "sum(rose_environment_trajectories_opened_total)",
                "{{outcome}}": "sum by (outcome) (rose_trainer_outcomes_total)",
            },
        ),
        Panel(
            "Samples",
            "Samples that the trainer read, by what it did with them, and samples that wait for their group.",
            "short",
            {
                "{{taken}}": f"sum by (taken) (rate(rose_trainer_samples_total[{RATE}]))",
                "held": "sum(rose_trainer_held_samples)",
            },
        ),
        Panel(
            "Transactions of environment workers",
            "Time from begin to commit: the mean of all workers, and of the slowest worker.",
            "s",
            mean_and_worst(each_mean("rose_environment_transaction_seconds")),
        ),
        Panel(
            "Deciding on a batch of records",
            "Time in which the router decides on one batch.",
            "s",
            quantiles("rose_router_batch_seconds"),
        ),
        Panel(
            "Results that did not count",
            "Late and duplicate results are dropped. Results of preempted turns are for the router.",
            "ops",
            {
                "{{reason}}": f"sum by (reason) (rate(rose_environment_results_dropped_total[{RATE}]))",
                "late, router": f"sum(rate(rose_router_late_results_total[{RATE}]))",
                "lost dispatches": f"sum(rate(rose_router_lost_dispatches_total[{RATE}]))",
            },
        ),
        Panel(
            "Recoveries",
            "Recoveries of homes from the log, at each start of a worker and whenever homes move.",
            "short",
            {"recoveries": "sum(increase(rose_environment_recoveries_total[5m]))"},
        ),
        Panel(
            "Who is there",
            "Homes with an environment worker, and cells with a router.",
            "short",
            {"homes": "sum(rose_environment_homes)", "cells": "sum(rose_router_serves)"},
        ),
        Panel(
            "Clocks",
            "Largest difference between the clock of an executor and the router's clock.",
            "s",
            {"worst": "max(abs(rose_router_clock_behind_seconds))"},
        ),
    ],
)

DASHBOARDS = (SERVING, ROLLOUT, WEIGHTS, BUS)
"""All dashboards, in the order in which they are generated."""
