package agent

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc"
)

// Every field of REGISTER is held to its range, and the refusal names the field, the value and what is allowed.
func TestRegisterRefusals(t *testing.T) {
	long := strings.Repeat("x", ipc.MaxName+1)
	for name, c := range map[string]struct {
		change func(*ipc.Register)
		want   string
	}{
		"instance empty":       {func(m *ipc.Register) { m.Instance = "" }, "instance: 0 bytes, allowed: 1 to 128"},
		"instance long":        {func(m *ipc.Register) { m.Instance = long }, "instance: 129 bytes, allowed: 1 to 128"},
		"instance control":     {func(m *ipc.Register) { m.Instance = "a\nb" }, `instance: "a\nb", allowed`},
		"role":                 {func(m *ipc.Register) { m.Role = 2 }, "role: 2, allowed: 0 to 1"},
		"world zero":           {func(m *ipc.Register) { m.World = 0 }, "world: 0, allowed: 1 to 64"},
		"world":                {func(m *ipc.Register) { m.World = 65 }, "world: 65, allowed: 1 to 64"},
		"rank":                 {func(m *ipc.Register) { m.Rank = 1 }, "rank: 1, allowed: 0 to 0"},
		"shards zero":          {func(m *ipc.Register) { m.Shards = 0 }, "shards: 0, allowed: 1 to 1"},
		"shards over world":    {func(m *ipc.Register) { m.Shards = 2 }, "shards: 2, allowed: 1 to 1"},
		"shards":               {func(m *ipc.Register) { m.World, m.Shards = 64, 17 }, "shards: 17, allowed: 1 to 16"},
		"shard":                {func(m *ipc.Register) { m.Shard = 1 }, "shard: 1, allowed: 0 to 0"},
		"identity unsorted":    {func(m *ipc.Register) { m.Identity[0], m.Identity[1] = m.Identity[1], m.Identity[0] }, "allowed: sorted"},
		"identity no tenant":   {func(m *ipc.Register) { m.Identity = m.Identity[:2] }, "identity: no tenant, allowed"},
		"identity empty model": {func(m *ipc.Register) { m.Identity[1].Value = "" }, "identity: model is empty, allowed"},
		"identity large":       {func(m *ipc.Register) { m.Identity[1].Value = strings.Repeat("m", ipc.MaxIdentityBytes) }, "identity: 16"},
		"hash_tokens":          {func(m *ipc.Register) { m.HashTokens = 0 }, "hash_tokens: 0, allowed: 1 to 1048576"},
		"no groups":            {func(m *ipc.Register) { m.Groups = nil }, "groups: 0, allowed: 1 to 16"},
		"block_tokens":         {func(m *ipc.Register) { m.Groups[0].BlockTokens = 17 }, "groups[0].block_tokens: 17, allowed: a multiple of hash_tokens (16)"},
		"block_tokens large":   {func(m *ipc.Register) { m.Groups[0].BlockTokens = 1 << 21 }, "groups[0].block_tokens: 2097152, allowed: 1 to 1048576"},
		"num_blocks":           {func(m *ipc.Register) { m.Groups[0].NumBlocks = 0 }, "groups[0].num_blocks: 0, allowed: 1 to"},
		"align": {func(m *ipc.Register) {
			m.HashTokens = 1
			for _, n := range []uint32{1021, 1019, 1013, 1009} {
				m.Groups = append(m.Groups, ipc.GroupDesc{BlockTokens: n, NumBlocks: 1})
			}
		}, "least common multiple"},
		"lookup slash":          {func(m *ipc.Register) { m.LookupName = "a/b" }, `lookup_name: "a/b", allowed is the name of a file`},
		"lookup dot":            {func(m *ipc.Register) { m.LookupName = ".a" }, "allowed is the name of a file without a leading dot"},
		"lookup long":           {func(m *ipc.Register) { m.LookupName = long }, "lookup_name: 129 bytes, allowed"},
		"lookup path":           {func(m *ipc.Register) { m.LookupName = long[:100] }, "its path has"},
		"lookup session":        {func(m *ipc.Register) { m.LookupName = "session.sock" }, "is taken by the agent"},
		"lookup admin":          {func(m *ipc.Register) { m.LookupName = "admin.sock" }, "is taken by the agent"},
		"lookup own":            {func(m *ipc.Register) { m.LookupName = "lookup.sock" }, "is taken by the agent"},
		"lookup lock":           {func(m *ipc.Register) { m.LookupName = "a.lock" }, "is taken by the agent"},
		"worker no regions":     {func(m *ipc.Register) { m.Regions = 0 }, "regions: 0, allowed: 1 to 4096"},
		"worker no segments":    {func(m *ipc.Register) { m.Segments = 0 }, "segments: 0, allowed: 1 to 65536"},
		"worker regions":        {func(m *ipc.Register) { m.Regions = 4097 }, "regions: 4097, allowed: 1 to 4096"},
		"events":                {func(m *ipc.Register) { m.Sync = &ipc.SyncDesc{Events: 1 << 17} }, "sync.events: 131072, allowed: 0 to 65536"},
		"scheduler has rank":    {func(m *ipc.Register) { m.Role, m.World, m.Rank = 0, 2, 1 }, "rank: 1, allowed: 0 for a scheduler"},
		"scheduler has regions": {func(m *ipc.Register) { m.Role = 0 }, "regions: 1, allowed: 0 for a scheduler"},
	} {
		t.Run(name, func(t *testing.T) {
			m := register("a")
			m.Regions, m.Segments = 1, 1
			c.change(m)
			err := checkRegister(m, "/run/kvagent")
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want one with %q", err, c.want)
			}
		})
	}
	m := register("a")
	m.Regions, m.Segments = 1, 1
	if err := checkRegister(m, "/run/kvagent"); err != nil {
		t.Fatalf("a good one is refused: %v", err)
	}
}

func TestRegionAndSegmentRefusals(t *testing.T) {
	const size = 1 << 20
	regions := map[uint32]ipc.RegionDesc{0: {ID: 0, Kind: ipc.RegionFD, Size: size}, 1: {ID: 1, Kind: ipc.RegionPeer, Size: size, Addr: 4096}}
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"kind":           {checkRegion(&ipc.RegionDesc{Kind: 5, Size: 1}), "region 0.kind: 5, allowed: 1 to 4"},
		"size zero":      {checkRegion(&ipc.RegionDesc{Kind: 1}), "region 0.size: 0, allowed: 1 to"},
		"size":           {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1 << 62}), "region 0.size"},
		"address":        {checkRegion(&ipc.RegionDesc{Kind: 2, Size: 1}), "region 0.addr"},
		"address wraps":  {checkRegion(&ipc.RegionDesc{Kind: 2, Size: 1 << 40, Addr: 1<<47 - 1}), "region 0.addr"},
		"address of fd":  {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1, Addr: 1}), "allowed: 0 for kind 1"},
		"handle":         {checkRegion(&ipc.RegionDesc{Kind: 3, Size: 1, Handle: []byte{1}}), "handle: 1 bytes, allowed: 80"},
		"handle of fd":   {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1, Handle: []byte{1}}), "handle: 1 bytes, allowed: 0"},
		"no region":      {checkSegment(0, &ipc.SegmentDesc{Region: 9, Bytes: 1}, 1, regions), "segment 0.region: 9, allowed"},
		"bytes":          {checkSegment(0, &ipc.SegmentDesc{}, 1, regions), "segment 0.bytes: 0, allowed: 1 to"},
		"stride":         {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 7}, 2, regions), "segment 0.stride: 7, allowed: 8"},
		"past the end":   {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 8, Offset: size - 15}, 2, regions), "allowed: inside of region 0"},
		"wraps":          {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 1 << 63}, 3, regions), "allowed: inside of region 0"},
		"offset wraps":   {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Offset: ^uint64(0) - 3}, 1, regions), "allowed: inside of region 0"},
		"sync region":    {checkSync(&ipc.SyncDesc{Region: 9}, regions, false), "sync.region: 9, allowed"},
		"sync kind":      {checkSync(&ipc.SyncDesc{Region: 1}, regions, false), "is of kind 2, allowed: kind 1"},
		"step odd":       {checkSync(&ipc.SyncDesc{StepOff: 4}, regions, false), "sync.step_off: 4, allowed: a multiple of 8"},
		"step past":      {checkSync(&ipc.SyncDesc{StepOff: size}, regions, false), "sync.step_off"},
		"events past":    {checkSync(&ipc.SyncDesc{EventsOff: size - 16, Events: 2}, regions, false), "sync.events_off"},
		"revokes wrap":   {checkSync(&ipc.SyncDesc{RevokeOff: ^uint64(0) - 3, Revokes: 1}, regions, false), "sync.revoke_off"},
		"piece's handle": {checkRegion(&ipc.RegionDesc{Kind: 4, Size: 1, Handle: make([]byte, 64)}), "handle: 64 bytes, allowed: 16"},
		"offset too far": {checkRegion(&ipc.RegionDesc{Kind: 3, Size: 2, Addr: 1<<46 - 1, Handle: make([]byte, 80)}), "region 0.addr"},
		"offset of peer": {checkRegion(&ipc.RegionDesc{Kind: 4, Size: 1, Addr: 1, Handle: make([]byte, 16)}), "allowed: 0 for kind 4"},
		"GPU events":     {checkSync(&ipc.SyncDesc{EventsOff: size - 32, Events: 1}, regions, true), "sync.events_off"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%s: %v, want one with %q", name, c.err, c.want)
		}
	}
	if err := checkSync(&ipc.SyncDesc{EventsOff: size - 64, Events: 1}, regions, true); err != nil {
		t.Errorf("an event of a GPU that ends with its region: %v", err)
	}
	if err := checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 8, Offset: size - 16}, 2, regions); err != nil {
		t.Errorf("a segment that ends with its region: %v", err)
	}
}

// Regions and segments may come in many messages; the answer comes when all have.
func TestRegisterInParts(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	m := register("parts")
	regions, fds, _ := c.prepare(m)
	const pieces = 8 // of a block
	m.Segments = pieces
	c.send(m)
	c.send(&ipc.Regions{Req: 1, List: regions.List[:1]}, fds[0])
	c.send(&ipc.Regions{Req: 1, List: regions.List[1:]}, fds[1])
	for i := range uint64(pieces) {
		if st := r.agent.Status(); st.Regions != 0 {
			t.Fatalf("%d regions are open before all parts have come", st.Regions)
		}
		c.send(&ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{
			Offset: i * testBlockBytes / pieces, Stride: testBlockBytes, Bytes: testBlockBytes / pieces,
		}}})
	}
	answer := c.registered(next[*ipc.Registered](c))
	if answer.Epoch != 1 || answer.LookupPath != r.path(ipc.LookupSocket) || answer.Space != m.Space() {
		t.Errorf("REGISTERED %+v", answer)
	}
	c.fill(3, 9)
	if got := c.save(1, chain(1, 1), 3); !all(got, ipc.BlockOK) {
		t.Fatalf("save %v", got)
	}
	if got := c.load(1, 0, chain(1, 1), 5); !all(got, ipc.BlockOK) || !c.filled(5, 9) {
		t.Fatalf("load %v", got)
	}
}

// What is wrong in a part refuses the registration, leaves nothing open, and the session may try again.
func TestRefusedPartsLeaveNothing(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	for name, change := range map[string]func(*ipc.Register, *ipc.Regions, *ipc.Segments){
		"region twice":    func(_ *ipc.Register, g *ipc.Regions, _ *ipc.Segments) { g.List[1].ID = g.List[0].ID },
		"segment outside": func(_ *ipc.Register, _ *ipc.Regions, s *ipc.Segments) { s.List[0].Offset = 1 },
		"no such group":   func(_ *ipc.Register, _ *ipc.Regions, s *ipc.Segments) { s.Group = 1 },
		"sync outside":    func(m *ipc.Register, _ *ipc.Regions, _ *ipc.Segments) { m.Sync.EventsOff = 1 << 30 },
		"too many":        func(m *ipc.Register, _ *ipc.Regions, s *ipc.Segments) { s.List = append(s.List, s.List[0]) },
		"device says no":  func(_ *ipc.Register, g *ipc.Regions, _ *ipc.Segments) { g.List[1].Size = 1 << 40 },
	} {
		t.Run(name, func(t *testing.T) {
			m := register("refused")
			regions, fds, segments := c.prepare(m)
			defer func() { check(t, c.engine.Close()); c.engine = nil }()
			change(m, regions, segments)
			before := countFDs(t)
			c.send(m)
			c.send(regions, fds...)
			c.send(segments)
			if answer := next[*ipc.Registered](c); answer.Status != ipc.RegRefused || answer.Text == "" {
				t.Fatalf("answer %+v", answer)
			}
			c.send(&ipc.Ping{Req: 5})
			next[*ipc.Pong](c)
			if st := r.agent.Status(); st.Engines != 0 || st.Regions != 0 {
				t.Errorf("left: %+v", st)
			}
			if after := countFDs(t); after != before {
				t.Errorf("%d descriptors, %d before", after, before)
			}
		})
	}
	m := register("good")
	c.registered(c.registerWorker(m))
}

func countFDs(t *testing.T) int {
	t.Helper()
	n := 0
	for fd := range 1024 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
			n++
		}
	}
	return n
}

// Sessions of one instance must fit together, and engines of one space too.
func TestRegistrationsMustFit(t *testing.T) {
	r := newRig(t)
	reg := register("first")
	reg.World, reg.Shards = 2, 2
	reg.LookupName = "look"
	r.joinEngine(reg)
	for name, c := range map[string]struct {
		change func(*ipc.Register)
		block  uint32 // bytes; 0: as the others have it
		want   string
	}{
		"rank twice":      {func(m *ipc.Register) { m.Instance = "first" }, 0, `rank 0 of instance "first" is already registered by process`},
		"other world":     {func(m *ipc.Register) { m.Instance, m.World = "first", 3 }, 0, "world: 3, allowed: 2"},
		"other identity":  {func(m *ipc.Register) { m.Instance, m.Identity[1].Value = "first", "x" }, 0, "identity: not that of the other sessions"},
		"other size":      {func(*ipc.Register) {}, 2048, "segments: group 0, shard 0: 2048 bytes of one block, allowed: 4096"},
		"name of another": {func(m *ipc.Register) { m.Identity[1].Value, m.LookupName = "x", "look" }, 0, `lookup_name: "look" is held by instance "first"`},
	} {
		t.Run(name, func(t *testing.T) {
			s := r.dial()
			defer s.close()
			m := register("second")
			m.World, m.Shards = 2, 2
			c.change(m)
			regions, fds, segments := s.prepare(m)
			if c.block != 0 {
				segments.List[0].Bytes = c.block
			}
			s.send(m)
			s.send(regions, fds...)
			s.send(segments)
			answer := next[*ipc.Registered](s)
			if answer.Status != ipc.RegRefused || !strings.Contains(answer.Text, c.want) {
				t.Fatalf("answer %+v, want one with %q", answer, c.want)
			}
		})
	}
}

// Every shard must be left a rank.
func TestShardsWithoutRanks(t *testing.T) {
	r := newRig(t)
	reg := register("tp4")
	reg.World, reg.Shards = 3, 2
	for rank := range uint32(3) {
		c := r.dial()
		m := *reg
		m.Rank = rank // all of shard 0
		answer := c.registerWorker(&m)
		if want := uint8(ipc.RegDone); rank < 2 && answer.Status != want {
			t.Fatalf("rank %d: %+v", rank, answer)
		}
		if rank == 2 && (answer.Status != ipc.RegRefused || !strings.Contains(answer.Text, "every shard has a rank")) {
			t.Fatalf("rank 2 leaves shard 1 without a rank: %+v", answer)
		}
	}
}

// Before the sizes of all shards are known nothing can be saved, and nothing is stored.
func TestJobsBeforeTheSpaceIsOpen(t *testing.T) {
	r := newRig(t)
	reg := register("tp2")
	reg.World, reg.Shards = 2, 2
	a := r.dial()
	one := *reg
	a.registered(a.registerWorker(&one))
	if got := a.save(1, chain(1, 2), 0); !all(got, ipc.BlockBusy) {
		t.Errorf("save %v, want busy", got)
	}
	if got := a.load(1, 0, chain(1, 2), 0); !all(got, ipc.BlockMissing) {
		t.Errorf("load %v, want missing", got)
	}
	a.send(&ipc.Reset{Req: 3})
	if got := next[*ipc.ResetDone](a); got.Status != ipc.RegDone || got.Epoch != 2 {
		t.Errorf("reset %+v, want epoch 2", got)
	}
	b := r.dial()
	two := *reg
	two.Rank, two.Shard = 1, 1
	if answer := b.registered(b.registerWorker(&two)); answer.Epoch != 2 {
		t.Errorf("epoch %d, want the 2 of the reset before the space opened", answer.Epoch)
	}
	if got := a.save(1, chain(1, 2), 0); !all(got, ipc.BlockStale) {
		t.Errorf("save with the old epoch %v, want stale", got)
	}
	if got := a.save(2, chain(1, 2), 0); !all(got, ipc.BlockOK) {
		t.Errorf("save %v, want ok", got)
	}
}

func TestUnregister(t *testing.T) {
	r := newRig(t)
	_, w, _ := r.joinEngine(register("a"))
	w[0].send(&ipc.Unregister{Req: 9})
	if got := next[*ipc.Unregistered](w[0]); got.Status != ipc.RegDone || got.Req != 9 {
		t.Fatalf("%+v", got)
	}
	if st := r.agent.Status(); st.Regions != 0 {
		t.Fatalf("%d regions are open after UNREGISTERED", st.Regions)
	}
	if got := w[0].save(1, chain(1, 1), 0); !all(got, ipc.BlockInvalid) {
		t.Errorf("save without a registration: %v", got)
	}
	w[0].send(&ipc.Unregister{Req: 10})
	if got := next[*ipc.Unregistered](w[0]); got.Status != ipc.RegRefused {
		t.Errorf("%+v", got)
	}
	check(t, w[0].engine.Close())
	w[0].registered(w[0].registerWorker(register("a")))
}

// More engines than the limit are refused, and one that goes makes room.
func TestEngineLimit(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Engines = 2 }))
	var last *client
	for i := range 3 {
		c := r.dial()
		answer := c.registerWorker(register(fmt.Sprint("e", i)))
		if want := i < 2; (answer.Status == ipc.RegDone) != want {
			t.Fatalf("engine %d: %+v", i, answer)
		}
		if i == 1 {
			last = c
		}
	}
	last.close()
	c := r.dial()
	c.registered(c.registerWorker(register("e3")))
}
