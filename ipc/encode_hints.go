package ipc

import "math"

// The walks over the fields of messages about how blocks will be used.

func (m *Hint) walk(w *wire) {
	w.begin(TypeHint, 7)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	w.str("session", &m.Session, 0, MaxHintID)
	num(w, "finish", &m.Finish, 0, MaxFinish)
	num(w, "output", &m.Output, 0, math.MaxUint32)
	list(w, "actions", &m.Actions, 0, MaxHintActions, 6)
	for i := range m.Actions {
		w.elem("actions", i, 5)
		m.Actions[i].fields(w)
	}
	w.leave()
	list(w, "chains", &m.Chains, 1, MaxGroups, 5)
	for i := range m.Chains {
		w.elem("chains", i, 4)
		m.Chains[i].fields(w)
	}
	w.leave()
	blocks := 0
	for i := range m.Chains {
		blocks += m.Chains[i].blocks()
	}
	if blocks > MaxJobBlocks && w.err == nil {
		w.fail(ReasonRange, "chains", "%d blocks, allowed is 1 to %d", blocks, MaxJobBlocks)
	}
}

func (a *HintAction) fields(w *wire) {
	w.str("id", &a.ID, 0, MaxHintID)
	num(w, "kind", &a.Kind, HintRetain, HintFetch)
	num(w, "priority", &a.Priority, 0, MaxPriority)
	num(w, "ms", &a.MS, 0, MaxHintMS)
	w.str("peer", &a.Peer, 0, MaxPeerAddress)
}

func (c *HintChain) fields(w *wire) {
	num(w, "group", &c.Group, 0, MaxGroups-1)
	num(w, "hash_len", &c.HashLen, 1, MaxHashLen)
	w.bin("hashes", &c.Hashes, 1, MaxJobBlocks*MaxHashLen)
	w.bin("own", &c.Own, 0, MaxJobBlocks/8)
	w.run(nil, c.HashLen, c.Hashes)
	if n := len(c.Own); n != 0 && w.err == nil && n != (c.blocks()+7)/8 {
		w.fail(ReasonLengths, "own", "%d bytes, allowed is 0 or %d, a bit for each hash", n, (c.blocks()+7)/8)
	}
}

func (c *HintChain) blocks() int {
	if c.HashLen == 0 {
		return 0
	}
	return len(c.Hashes) / int(c.HashLen)
}

func (m *Hinted) walk(w *wire) {
	w.begin(TypeHinted, 3)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	list(w, "receipts", &m.Receipts, 1, MaxHintActions, 7)
	for i := range m.Receipts {
		w.elem("receipts", i, 6)
		m.Receipts[i].fields(w)
	}
	w.leave()
}

func (r *HintReceipt) fields(w *wire) {
	w.str("id", &r.ID, 0, MaxHintID)
	num(w, "kind", &r.Kind, HintRetain, HintFetch)
	num(w, "state", &r.State, HintAccepted, HintMissing)
	num(w, "blocks", &r.Blocks, 0, math.MaxUint32)
	num(w, "bytes", &r.Bytes, 0, math.MaxUint64)
	w.str("reason", &r.Reason, 0, MaxText)
}
