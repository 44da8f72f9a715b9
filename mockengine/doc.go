// Package mockengine plays an inference engine as far as a KV connector sees one: vLLM's scheduler, its prefix
// cache and its workers, in a process of its own, over the real protocols. There is no model: every KV block holds
// bytes derived from its whole prefix, position, layer and rank, so that each byte that comes back can be checked.
//
// One goroutine (Engine) owns all scheduler state. Workers run steps on streams, as a GPU would; the link to the
// agent has goroutines of its own and hands the engine finished jobs through one queue.
//
//	trace ──▶ Engine: waiting ─▶ loading ─▶ running ─▶ finished
//	             │ step n               ▲        │
//	             ▼                      │        ▼ save names step n
//	          workers (streams)       Agent seam (link: sessions, look-ups)
package mockengine
