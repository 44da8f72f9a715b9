"""KV events: what routers are told of the blocks that the agent's memory and disk hold.

The agent knows which blocks it holds, and the engines know their tokens. Each engine says the
tokens of what it saves and loads (tokens), asks the agent what has changed, and publishes that in
its own stream of events (publication), in the form of the running vLLM (form). An idle engine is
woken for it (waking).
"""
