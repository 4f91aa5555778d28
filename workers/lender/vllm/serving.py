"""What the serving engine holds and what its steps take, read off its scheduler between steps.

Keeps true
- Nothing of serving's is written to: `schedule` of its scheduler is called as it was, and what it returns is kept.
- It costs a serving step a look at each request in its batch.

Times are seconds of time.monotonic(). vLLM says of a request's arrival when that was by the host's clock; both clocks
are of one host, and a clock that was set meanwhile makes no arrival later than now.

A request that serving preempted computes its tokens anew: to what its steps cost it is a prompt again.
"""

import time
from typing import Any

from workers.lender.admission import Admission, Serving


class ServingView:
    """Serving's side of admission: tells it of every step, and says what serving holds."""

    def __init__(self, core: Any, admission: Admission) -> None:
        """`core`: an EngineCoreProc whose steps are synchronous."""
        self._scheduler = core.scheduler
        self._unread = core.input_queue.queue
        """The queue's own deque: to ask it takes no lock."""
        self._admission = admission
        self._scheduled: Any = None
        """Of the step that runs: vLLM's SchedulerOutput."""
        self._last: dict[str, float] = {}
        """By request that has had a token, when it had its latest."""
        schedule = core.scheduler.schedule

        def noted(*arguments: Any) -> Any:
            self._scheduled = schedule(*arguments)
            return self._scheduled

        core.scheduler.schedule = noted

    def stepped(self, began: float, ended: float) -> None:
        """Serving made a step in this time, if it had anything to do."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None and scheduled.total_num_scheduled_tokens:
            self._served(scheduled, began, ended)
        elif self._last and not self._scheduler.has_requests():
            self._last.clear()

    @property
    def unread(self) -> bool:
        """Whether something came that serving has not looked at."""
        return bool(self._unread)

    def holds(self) -> Serving:
        """What serving holds now."""
        running, waiting = self._scheduler.running, self._scheduler.get_request_counts()[1]
        first = [request for request in running if request.request_id not in self._last]
        if waiting:
            first += self._scheduler.waiting
        now = time.monotonic()
        behind = time.time() - now
        return Serving(
            prefills=[(min(now, request.arrival_time - behind), _left(request)) for request in first],
            last_tokens=[at for request in running if (at := self._last.get(request.request_id)) is not None],
            waiting=waiting,
            queued=self.unread,
        )

    def _served(self, scheduled: Any, began: float, ended: float) -> None:
        for request in scheduled.scheduled_new_reqs:
            self._admission.arrived(len(request.prompt_token_ids) - request.num_computed_tokens, began)
        counts = scheduled.num_scheduled_tokens
        decoding = sum(count == 1 and name in self._last for name, count in counts.items())
        self._admission.served(
            prompt_tokens=scheduled.total_num_scheduled_tokens - decoding,
            decoding=decoding,
            held=len(counts) + self._scheduler.get_request_counts()[1],
            seconds=ended - began,
        )
        for name in counts:
            request = self._scheduler.requests.get(name)
            if request is None:
                self._last.pop(name, None)
            elif request.num_output_tokens:
                self._last[name] = ended
        if len(self._last) > len(self._scheduler.requests):  # some were aborted
            self._last = {name: at for name, at in self._last.items() if name in self._scheduler.requests}


def _left(request: Any) -> int:
    left: int = request.num_tokens - request.num_computed_tokens
    return max(0, left)
