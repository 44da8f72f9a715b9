package ipc

import "math"

// The walks over the fields of registration messages.

func (m *Register) walk(w *wire) {
	w.begin(TypeRegister, 15)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	w.str("instance", &m.Instance, 1, MaxName)
	num(w, "role", &m.Role, RoleScheduler, RoleWorker)
	num(w, "rank", &m.Rank, 0, MaxWorld-1)
	num(w, "world", &m.World, 1, MaxWorld)
	m.walkHeld(w)
	num(w, "shards", &m.Shards, 1, MaxShards)
	m.walkIdentity(w)
	m.walkGroups(w)
	num(w, "hash_tokens", &m.HashTokens, 1, math.MaxUint32)
	w.str("lookup_name", &m.LookupName, 0, MaxName)
	m.walkSync(w)
	num(w, "regions", &m.Regions, 0, MaxRegions)
	num(w, "segments", &m.Segments, 0, MaxSegments)
}

// walkHeld walks the shards that a worker holds.
func (m *Register) walkHeld(w *wire) {
	list(w, "held", &m.Held, 0, MaxShards, 1)
	for i := range m.Held {
		w.elem("held", i, 0)
		num(w, "", &m.Held[i], 0, MaxShards-1)
	}
	w.leave()
}

func (m *Register) walkIdentity(w *wire) {
	list(w, "identity", &m.Identity, 0, MaxIdentityPairs, 3)
	bytes := 0
	for i := range m.Identity {
		p := &m.Identity[i]
		w.elem("identity", i, 2)
		w.str("key", &p.Key, 1, MaxIdentityBytes)
		w.str("value", &p.Value, 0, MaxIdentityBytes)
		if i > 0 && w.err == nil && m.Identity[i-1].Key >= p.Key {
			w.fail(ReasonRange, "key", "%.64q after %.64q, keys must be sorted and distinct", p.Key,
				m.Identity[i-1].Key)
		}
		bytes += len(p.Key) + len(p.Value)
	}
	w.leave()
	if w.err == nil && bytes > MaxIdentityBytes {
		w.fail(ReasonRange, "identity", "%d bytes of keys and values, allowed is 0 to %d", bytes, MaxIdentityBytes)
	}
}

func (m *Register) walkGroups(w *wire) {
	list(w, "groups", &m.Groups, 1, MaxGroups, 4)
	for i := range m.Groups {
		g := &m.Groups[i]
		w.elem("groups", i, 3)
		num(w, "block_tokens", &g.BlockTokens, 1, math.MaxUint32)
		num(w, "num_blocks", &g.NumBlocks, 0, math.MaxUint32)
		num(w, "window", &g.Window, 0, math.MaxUint32)
	}
	w.leave()
}

const syncFields = 6

func (m *Register) walkSync(w *wire) {
	size := 0
	if m.Sync != nil {
		size = syncFields
	}
	n := w.array("sync", size, 0, syncFields)
	if n == 0 || w.err != nil {
		return
	}
	if n != syncFields {
		w.fail(ReasonFields, "sync", "%d elements, allowed is 0 or %d", n, syncFields)
		return
	}
	if w.decoding {
		m.Sync = new(SyncDesc)
	}
	num(w, "sync.region", &m.Sync.Region, 0, math.MaxUint32)
	num(w, "sync.step_off", &m.Sync.StepOff, 0, math.MaxUint64)
	num(w, "sync.events_off", &m.Sync.EventsOff, 0, math.MaxUint64)
	num(w, "sync.events", &m.Sync.Events, 0, MaxEvents)
	num(w, "sync.revoke_off", &m.Sync.RevokeOff, 0, math.MaxUint64)
	num(w, "sync.revokes", &m.Sync.Revokes, 0, MaxEvents)
}

func (m *Regions) walk(w *wire) {
	w.begin(TypeRegions, 3)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	list(w, "regions", &m.List, 0, MaxRegionsMessage, 7)
	for i := range m.List {
		r := &m.List[i]
		w.elem("regions", i, 5)
		num(w, "id", &r.ID, 0, math.MaxUint32)
		num(w, "kind", &r.Kind, RegionFD, RegionCUDAFD)
		num(w, "size", &r.Size, 0, math.MaxUint64)
		num(w, "addr", &r.Addr, 0, math.MaxUint64)
		w.bin("handle", &r.Handle, 0, MaxHandle)
	}
	w.leave()
}

// Descriptors returns how many file descriptors come with the message.
func (m *Regions) Descriptors() (n int) {
	for i := range m.List {
		if k := m.List[i].Kind; k == RegionFD || k == RegionCUDAFD {
			n++
		}
	}
	return n
}

func (m *Segments) walk(w *wire) {
	w.begin(TypeSegments, 5)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "shard", &m.Shard, 0, MaxShards-1)
	num(w, "group", &m.Group, 0, MaxGroups-1)
	list(w, "segments", &m.List, 0, MaxSegmentsMessage, 5)
	for i := range m.List {
		s := &m.List[i]
		w.elem("segments", i, 4)
		num(w, "region", &s.Region, 0, math.MaxUint32)
		num(w, "offset", &s.Offset, 0, math.MaxUint64)
		num(w, "stride", &s.Stride, 0, math.MaxUint64)
		num(w, "bytes", &s.Bytes, 1, math.MaxUint32)
	}
	w.leave()
}

func (m *Registered) walk(w *wire) {
	w.begin(TypeRegistered, 7)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "status", &m.Status, 0, math.MaxUint8)
	w.text(&m.Text)
	w.bin16("space", &m.Space)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
	w.str("lookup_path", &m.LookupPath, 0, MaxSocketPath)
}

// The walks over the fields of job messages.

// task walks what all jobs have.
func (w *wire) task(job *uint64, epoch *uint32, step *uint64, event *uint32) {
	num(w, "job", job, 0, math.MaxUint64)
	num(w, "epoch", epoch, 0, math.MaxUint32)
	num(w, "step", step, 0, math.MaxUint64)
	num(w, "event", event, 0, math.MaxUint32)
}

func (m *Save) walk(w *wire) {
	w.begin(TypeSave, 7)
	w.task(&m.Job, &m.Epoch, &m.Step, &m.Event)
	num(w, "revoke", &m.Revoke, 0, math.MaxUint32)
	walkSections(w, &m.Sections)
}

func (m *Load) walk(w *wire) {
	w.begin(TypeLoad, 7)
	w.task(&m.Job, &m.Epoch, &m.Step, &m.Event)
	num(w, "lease", &m.Lease, 0, math.MaxUint64)
	walkSections(w, &m.Sections)
}

func (m *Stages) walk(w *wire) {
	w.begin(TypeStages, 4)
	num(w, "off", &m.Off, 0, math.MaxUint64)
	num(w, "count", &m.Count, 1, MaxStageWords)
	w.bin("stages", &m.List, 2, MaxSegments*2)
	if w.err == nil && len(m.List)%2 != 0 {
		w.fail(ReasonLengths, "stages", "%d bytes, no multiple of 2", len(m.List))
	}
}

func (m *StagedLoad) walk(w *wire) {
	w.begin(TypeStagedLoad, 8)
	w.task(&m.Job, &m.Epoch, &m.Step, &m.Event)
	num(w, "lease", &m.Lease, 0, math.MaxUint64)
	num(w, "word", &m.Word, 0, MaxStageWords-1)
	walkSections(w, &m.Sections)
}

func walkSections(w *wire, p *[]Section) {
	list(w, "sections", p, 1, MaxSections, 10)
	blocks := 0
	for i := range *p {
		s := &(*p)[i]
		w.elem("sections", i, 5)
		s.fields(w)
		if w.err != nil {
			return
		}
		blocks += s.Len()
	}
	w.leave()
	if w.err == nil && blocks > MaxJobBlocks {
		w.fail(ReasonRange, "sections", "%d blocks, allowed is 1 to %d", blocks, MaxJobBlocks)
	}
}

func (s *Section) fields(w *wire) {
	num(w, "group", &s.Group, 0, MaxGroups-1)
	w.bin("parent", &s.Parent, 0, MaxHashLen)
	num(w, "hash_len", &s.HashLen, 1, MaxHashLen)
	w.bin("hashes", &s.Hashes, 1, MaxJobBlocks*MaxHashLen)
	w.bin("blocks", &s.Blocks, 4, MaxJobBlocks*4)
	if w.err != nil {
		return
	}
	w.run(s.Parent, s.HashLen, s.Hashes)
	if n := len(s.Hashes) / int(s.HashLen); len(s.Blocks) != n*4 {
		w.fail(ReasonLengths, "blocks", "%d bytes, %d hashes need %d", len(s.Blocks), n, n*4)
	}
}

// Len returns the number of blocks of a section.
func (s *Section) Len() int { return len(s.Blocks) / 4 }

func (m *Done) walk(w *wire) {
	w.begin(TypeDone, 3)
	num(w, "job", &m.Job, 0, math.MaxUint64)
	w.bin("statuses", &m.Status, 0, MaxJobBlocks)
}

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
