"""A plain scheduler with a prefix cache, one request and one block at a time: the oracle of the real one."""

BLOCK = 512


class PlainCache:
    """Blocks by hash, with the names of their holders and the time of the last release."""

    def __init__(self, num_blocks):
        self.num_blocks, self.blocks, self.time = num_blocks, {}, 0

    def longest(self, hashes, prompt):
        """Tokens of the longest cached prefix that is shorter than the prompt."""
        hit = 0
        while hit < len(hashes) and (hit + 1) * BLOCK < prompt and hashes[hit] in self.blocks:
            hit += 1
        return hit * BLOCK

    def take(self, state, tokens):
        """Let a request hold its full blocks up to so many tokens, the next one first, while there is room."""
        while len(state["held"]) < min(len(state["hashes"]), tokens // BLOCK):
            block = state["hashes"][len(state["held"])]
            if block not in self.blocks and len(self.blocks) >= self.num_blocks:
                free = [key for key, value in self.blocks.items() if not value["holders"]]
                if not free:
                    return
                del self.blocks[min(free, key=lambda key: self.blocks[key]["released"])]
            self.blocks.setdefault(block, {"holders": set(), "released": 0})["holders"].add(state["id"])
            state["held"].append(block)

    def give_back(self, state):
        """Let go of what a request holds, its last block first."""
        for block in reversed(state["held"]):
            self.time += 1
            self.blocks[block]["holders"].remove(state["id"])
            self.blocks[block]["released"] = self.time


def schedule_plainly(trace, bounds, seconds_of=None):
    """By request id, (query length, tokens computed, is decode, window start) of each step; and each request's times.

    seconds_of gives a step's seconds from its tokens; without it all requests wait from the start and there are no
    times. All drafts are accepted and KV blocks suffice.
    """
    query_len = bounds.num_speculative_tokens + 1
    cache = PlainCache(bounds.prefix_cache_blocks)
    waiting, running, steps, times, clock = list(trace), [], [], {}, 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].arrival_s)
        budget, step, stalled = bounds.max_num_batched_tokens, {}, False
        for state in running:
            is_decode = state["computed"] >= state["prompt"]
            take = query_len if is_decode else min(state["prompt"] - state["computed"], budget)
            if take > budget or take == 0:
                stalled = True
                break
            step[state["id"]] = (take, state["computed"], is_decode, state["start"])
            budget -= take
        while waiting and budget and not stalled and len(running) < bounds.max_num_seqs:
            request = waiting[0]
            if seconds_of and request.arrival_s > clock:
                break
            waiting.pop(0)
            state = {"id": request.request_id, "prompt": request.prompt_tokens, "left": request.output_tokens}
            state |= {"hashes": request.prefix_hashes, "held": [], "request": request, "first": None}
            hit = cache.longest(request.prefix_hashes, request.prompt_tokens) if bounds.prefix_cache_blocks else 0
            state["start"] = state["computed"] = hit - bounds.window if hit > bounds.window else 0
            if state["start"]:
                cache.take(state, hit)
            running.append(state)
            take = min(request.prompt_tokens - state["start"], budget)
            step[request.request_id] = (take, state["start"], False, state["start"])
            budget -= take
        clock += seconds_of(sum(take for take, *_ in step.values())) if seconds_of else 0
        for state in running:
            take, _, is_decode, _ = step.get(state["id"], (0, 0, False, 0))
            state["computed"] += take
            if take and not is_decode and bounds.prefix_cache_blocks:
                cache.take(state, state["computed"])
            if take and (is_decode or state["computed"] == state["prompt"]):
                if not is_decode and state["left"]:
                    state["first"] = clock
                state["left"] -= query_len if is_decode else 1
        for state in running:
            if state["computed"] >= state["prompt"] and state["left"] <= 0:
                cache.give_back(state)
                times[state["id"]] = (state["request"].arrival_s, state["first"], clock, state["request"].output_tokens)
        running = [s for s in running if s["computed"] < s["prompt"] or s["left"] > 0]
        steps.append(step)
    return steps, times if seconds_of else {}
