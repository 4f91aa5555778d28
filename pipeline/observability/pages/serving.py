"""Dashboard of serving: latencies of its users, and the capacity that guests use."""

from rose.pipeline.observability.panels import (
    CONTROL,
    LENDER,
    RATE,
    SCRAPED,
    Dashboard,
    Panel,
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
            "Share of its time in which a server shares its memory out anew.",
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
            "By what the control app decided, and how many of them were told by hand; who is on the way to another "
            "cell. If wakes and parkings, or moves, go on without end, look at its page.",
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
