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
