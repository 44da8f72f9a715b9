package ipc

import "math"

// The walks over the fields of messages about KV events.

func (m *BlockTokens) walk(w *wire) {
	w.begin(TypeBlockTokens, 7)
	num(w, "group", &m.Group, 0, MaxGroups-1)
	w.bin("parent", &m.Parent, 0, MaxHashLen)
	num(w, "hash_len", &m.HashLen, 1, MaxHashLen)
	w.bin("hashes", &m.Hashes, 1, MaxJobBlocks*MaxHashLen)
	w.bin("tokens", &m.Tokens, 4, MaxFrame)
	w.bin("extra", &m.Extra, 0, MaxExtra)
	w.run(m.Parent, m.HashLen, m.Hashes)
	w.tokens(m.Tokens, m.HashLen, m.Hashes)
}

func (m *NextEvents) walk(w *wire) {
	w.begin(TypeNextEvents, 4)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "blocks", &m.Blocks, 1, MaxEventBlocks)
	w.flag("anew", &m.Anew)
}

func (m *BlockEvents) walk(w *wire) {
	w.begin(TypeBlockEvents, 4)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "state", &m.State, EventsMore, EventsVoid)
	list(w, "runs", &m.Runs, 0, MaxEventBlocks, 14)
	for i := range m.Runs {
		w.elem("runs", i, 8)
		m.Runs[i].fields(w)
	}
	w.leave()
}

func (r *EventRun) fields(w *wire) {
	num(w, "kind", &r.Kind, EventStored, EventRemoved)
	num(w, "medium", &r.Medium, MediumMemory, math.MaxUint8)
	num(w, "group", &r.Group, 0, MaxGroups-1)
	w.bin("parent", &r.Parent, 0, MaxHashLen)
	num(w, "hash_len", &r.HashLen, 1, MaxHashLen)
	w.bin("hashes", &r.Hashes, 1, MaxEventBlocks*MaxHashLen)
	w.bin("tokens", &r.Tokens, 0, MaxFrame)
	w.bin("extra", &r.Extra, 0, MaxExtra)
	w.run(r.Parent, r.HashLen, r.Hashes)
	if r.Kind == EventStored {
		w.tokens(r.Tokens, r.HashLen, r.Hashes)
	} else if len(r.Parent)+len(r.Tokens)+len(r.Extra) > 0 && w.err == nil {
		w.fail(ReasonLengths, "tokens", "parent, tokens or extra of removed blocks, allowed is none")
	}
}

// run checks the hashes of a run.
func (w *wire) run(parent []byte, hashLen uint8, hashes []byte) {
	if w.err != nil {
		return
	}
	n := int(hashLen)
	if len(parent) != 0 && len(parent) != n {
		w.fail(ReasonLengths, "parent", "%d bytes, allowed is 0 or hash_len %d", len(parent), n)
	}
	if len(hashes)%n != 0 {
		w.fail(ReasonLengths, "hashes", "%d bytes, no multiple of hash_len %d", len(hashes), n)
	}
}

// tokens checks that every block of a run has as many tokens.
func (w *wire) tokens(tokens []byte, hashLen uint8, hashes []byte) {
	if w.err != nil {
		return
	}
	if blocks := len(hashes) / int(hashLen); len(tokens) == 0 || len(tokens)%(4*blocks) != 0 {
		w.fail(ReasonLengths, "tokens", "%d bytes, allowed is 4 for each token, as many for each of %d blocks",
			len(tokens), blocks)
	}
}
