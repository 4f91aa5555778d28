"""Dashboard of rollouts: turns from request to result, executors, environments."""

from rose.pipeline.observability.panels import RATE, Dashboard, Panel, each_mean, mean_and_worst, quantiles, rate_by

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
