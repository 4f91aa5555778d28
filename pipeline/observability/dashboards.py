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
            "Of the users of vLLM servers, as those tell it: guests are not in it. Hold it against the promise.",
            "s",
            quantiles("vllm:time_to_first_token_seconds"),
            SCRAPED,
        ),
        Panel(
            "Time between tokens of serving",
            "Of the same users.",
            "s",
            quantiles("vllm:inter_token_latency_seconds"),
            SCRAPED,
        ),
        Panel(
            "Serving's requests",
            "Of the users of lending servers. Waiting ones hold every guest back.",
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
            "What was left of the promise when serving was last looked at. Below 0 the promise was broken.",
            "s",
            {
                "prefill, least": f'min(min_over_time(rose_lender_headroom_seconds{{kind="prefill"}}[{RATE}]))',
                "decode, least": f'min(min_over_time(rose_lender_headroom_seconds{{kind="decode"}}[{RATE}]))',
            },
            f"{LENDER} whose users wait for it",
        ),
        Panel(
            "Longest piece of a guest's work",
            "How long serving may have to wait for a guest: what the yield bound is about.",
            "s",
            quantiles("rose_lender_guest_piece_seconds"),
            LENDER,
        ),
        Panel(
            "Why guests did not compute",
            "Times a second that a guest with work was held back, by what serving had.",
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
            "A cut takes half of the lent memory back; it then stays frozen until the next policy version.",
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
            "Share by which one step in ten takes longer or shorter than expected. Large ones cost slack.",
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
            "How long the open executors of a cell need for what waits, of the worst cell.",
            "s",
            {"waiting": "max(rose_control_waiting_seconds)"},
            CONTROL,
        ),
        Panel(
            "Share of turns done by lenders",
            "Of the tokens that were sampled, those on serving's GPUs.",
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
            "Asked for, and done. What is asked for and neither done nor given up waits or runs.",
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
            "Waiting turns want executors; a fleet that holds few while many wait refuses them.",
            "short",
            {"waiting": "sum(rose_router_waiting_turns)", "with executors": "sum(rose_router_outstanding_turns)"},
        ),
        Panel(
            "Wait for room",
            "From being asked for, or issued again, to the dispatch.",
            "s",
            {**quantiles("rose_router_dispatch_seconds"), "oldest": "max(rose_router_oldest_waiting_seconds)"},
        ),
        Panel(
            "A turn on its executor",
            "From the inbox to the last token: the mean of all executors, and that of the slowest.",
            "s",
            mean_and_worst(each_mean("rose_executor_turn_seconds")),
        ),
        Panel(
            "Tokens of an executor",
            "Sampled tokens a second: the mean executor, and the worst.",
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
            "Of what rollouts may hold. One that is full makes its turns wait.",
            "percentunit",
            mean_and_worst("1 - rose_executor_kv_free_bytes / (rose_executor_kv_capacity_bytes > 0)"),
        ),
        Panel(
            "Turns held",
            "The mean executor, and the one with most.",
            "short",
            mean_and_worst("rose_executor_held_turns"),
        ),
        Panel(
            "How attempts ended",
            "By outcome; what was dropped was meant for another start, or came under an older claim.",
            "ops",
            rate_by("outcome", "rose_executor_turns_total"),
        ),
        Panel(
            "Executors",
            "By standing: stale ones have not proven the current version, gone ones are silent.",
            "short",
            {"{{standing}}": "sum by (standing) (rose_router_executors)"},
        ),
        Panel(
            "A step of an environment",
            "Its own time. What is long here keeps trajectories from asking.",
            "s",
            quantiles("rose_environment_step_seconds"),
        ),
        Panel(
            "Trajectories",
            "Open, and the environments that live for them.",
            "short",
            {
                "open": "sum(rose_environment_trajectories)",
                "live environments": "sum(rose_environment_live_environments)",
                "groups not settled": "sum(rose_environment_unsettled_groups)",
            },
        ),
        Panel(
            "How trajectories end",
            "By ending; failed ones are the infrastructure's fault.",
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
            "Waiting for a batch says that rollouts are too slow, waiting for the policy that publishing is.",
            "s",
            {
                "waiting for the batch": each_mean("rose_trainer_batch_wait_seconds"),
                "waiting for the policy": each_mean("rose_trainer_policy_wait_seconds"),
                "training": each_mean("rose_trainer_training_seconds"),
                "checkpoint": each_mean("rose_trainer_checkpoint_seconds"),
            },
        ),
        Panel(
            "Reward and success",
            "Of the latest step.",
            "short",
            {"reward": "rose_trainer_reward_mean", "success": "rose_trainer_success_ratio"},
        ),
        Panel(
            "Drift of logprobs",
            "Trainer against engine, a token. It grows with staleness; without any it says that the two compute "
            "different models.",
            "short",
            {
                "KL, nats": "rose_trainer_behaviour_kl_nats",
                "|1 - ratio|": "abs(1 - rose_trainer_importance_mean_ratio)",
            },
        ),
        Panel(
            "Staleness",
            "In versions, of what the latest step was trained on.",
            "short",
            {"mean": "rose_trainer_staleness_versions", "worst": "rose_trainer_staleness_max_versions"},
        ),
        Panel(
            "Gradient",
            "Its norm, the share of clipped tokens, and minibatches of five minutes skipped for not being finite.",
            "short",
            {
                "norm": "rose_trainer_gradient_norm",
                "clipped share": "rose_trainer_clipped_ratio",
                "skipped": "increase(rose_trainer_skipped_minibatches_total[5m])",
            },
        ),
        Panel(
            "Versions behind",
            "Engines, behind the newest on the log: the mean, and the worst.",
            "short",
            mean_and_worst(
                "max by (job) (rose_trainer_policy_version) "
                "- on (job) group_right () (rose_executor_policy_version >= 0)"
            ),
        ),
        Panel(
            "Publishing a version",
            "Encoding and storing its chunks.",
            "s",
            quantiles("rose_weights_publish_seconds"),
        ),
        Panel(
            "Receiving a version",
            "Fetching, decoding and verifying: the mean of all receivers, and that of the slowest.",
            "s",
            mean_and_worst(each_mean("rose_weights_receive_seconds")),
        ),
        Panel(
            "The pause for a version",
            "An engine computes nothing meanwhile.",
            "s",
            mean_and_worst(each_mean("rose_executor_swap_seconds")),
        ),
        Panel(
            "Bytes of weights",
            "Published, what they stand for, and what all receivers read.",
            "Bps",
            {
                "published": f"sum(rate(rose_weights_published_bytes_total[{RATE}]))",
                "stand for": f"sum(rate(rose_weights_dense_bytes_total[{RATE}]))",
                "received": f"sum(rate(rose_weights_received_bytes_total[{RATE}]))",
            },
        ),
        Panel(
            "Versions refused",
            "By reason, and by engines that could not take what was staged. Any is worth a look.",
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
            "By topic, as the broker stored them.",
            "ops",
            rate_by("topic", "rose_bus_written_records_total"),
        ),
        Panel(
            "Records read", "By topic, of all readers together.", "ops", rate_by("topic", "rose_bus_read_records_total")
        ),
        Panel(
            "Dead letters",
            "In five minutes, by topic: `rose dlq list` says which and why.",
            "short",
            {"{{topic}}": "sum by (topic) (increase(rose_bus_dead_letters_total[5m]))"},
        ),
        Panel(
            "Ledger",
            "What became of all that was opened, since these processes began. What is not settled is in flight; "
            "`rose audit` proves it from the log.",
            "short",
            {
                "opened": "sum(rose_environment_trajectories_opened_total)",
                "{{outcome}}": "sum by (outcome) (rose_trainer_outcomes_total)",
            },
        ),
        Panel(
            "Samples",
            "That the trainer read, by what was done with them, and those that wait for their group.",
            "short",
            {
                "{{taken}}": f"sum by (taken) (rate(rose_trainer_samples_total[{RATE}]))",
                "held": "sum(rose_trainer_held_samples)",
            },
        ),
        Panel(
            "Transactions of environment workers",
            "From begin to commit: the mean worker, and the slowest.",
            "s",
            mean_and_worst(each_mean("rose_environment_transaction_seconds")),
        ),
        Panel(
            "Deciding on a batch of records",
            "In the router.",
            "s",
            quantiles("rose_router_batch_seconds"),
        ),
        Panel(
            "Results that did not count",
            "Late and doubled ones are fenced off; those of preempted turns are the router's.",
            "ops",
            {
                "{{reason}}": f"sum by (reason) (rate(rose_environment_results_dropped_total[{RATE}]))",
                "late, router": f"sum(rate(rose_router_late_results_total[{RATE}]))",
                "lost dispatches": f"sum(rate(rose_router_lost_dispatches_total[{RATE}]))",
            },
        ),
        Panel(
            "Recoveries",
            "Times that homes were built again from the log: at each start and whenever they move.",
            "short",
            {"recoveries": "sum(increase(rose_environment_recoveries_total[5m]))"},
        ),
        Panel(
            "Who is there",
            "Homes with an environment worker, and routers that serve: one.",
            "short",
            {"homes": "sum(rose_environment_homes)", "routers": "sum(rose_router_serves)"},
        ),
        Panel(
            "Clocks",
            "How far the clock of an executor is from the router's.",
            "s",
            {"worst": "max(abs(rose_router_clock_behind_seconds))"},
        ),
    ],
)

DASHBOARDS = (SERVING, ROLLOUT, WEIGHTS, BUS)
"""All dashboards, in the order in which they are generated."""
