package registration

import (
	"strings"
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// register returns a REGISTER of a worker that is as it must be.
func register(instance string) *ipc.Register {
	return &ipc.Register{
		Req: 1, Instance: instance, Role: ipc.RoleWorker, World: 1, Held: []uint32{0}, Shards: 1,
		Identity: []ipc.Pair{{Key: "dtype", Value: "bf16"}, {Key: "model", Value: "test"}, {Key: "tenant", Value: ""}},
		Groups:   []ipc.GroupDesc{{BlockTokens: 16, NumBlocks: 64}}, HashTokens: 16,
	}
}

// Every field of REGISTER is held to its range, and the refusal names the field, the value and what
// is allowed.
func TestRegisterRefusals(t *testing.T) {
	long := strings.Repeat("x", ipc.MaxName+1)
	for name, c := range map[string]struct {
		change func(*ipc.Register)
		want   string
	}{
		"instance control": {func(m *ipc.Register) { m.Instance = "a\nb" }, `instance: "a\nb", allowed`},
		"rank":             {func(m *ipc.Register) { m.Rank = 1 }, "rank: 1, allowed: 0 to 0"},
		"held of a scheduler": {func(m *ipc.Register) { m.Role = ipc.RoleScheduler },
			"held: 1, allowed: 0 to 0"},
		"held":       {func(m *ipc.Register) { m.Held[0] = 1 }, "held[0]: 1, allowed: 0 to 0"},
		"held twice": {func(m *ipc.Register) { m.Shards, m.Held = 9, []uint32{3, 3} }, "held[1]: 3 after 3, allowed"},
		"held none":  {func(m *ipc.Register) { m.Held, m.Regions = nil, 1 }, "held: 0, allowed: 1 to 1"},
		"held and segments": {func(m *ipc.Register) { m.Shards, m.Held, m.Regions = 2, []uint32{0, 1}, 1 },
			"segments: 1, allowed: 2 to"},
		"identity no tenant": {func(m *ipc.Register) { m.Identity = m.Identity[:2] }, "identity: no tenant, allowed"},
		"identity empty model": {func(m *ipc.Register) { m.Identity[1].Value = "" },
			"identity: no model, allowed"},
		"block_tokens": {func(m *ipc.Register) { m.Groups[0].BlockTokens = 17 },
			"groups[0].block_tokens: 17, allowed: a multiple of hash_tokens (16)"},
		"block_tokens large": {func(m *ipc.Register) { m.Groups[0].BlockTokens = 1 << 21 },
			"groups[0].block_tokens: 2097152, allowed: 1 to 1048576"},
		"num_blocks": {func(m *ipc.Register) { m.Groups[0].NumBlocks = 0 },
			"groups[0].num_blocks: 0, allowed: 1 to"},
		"align": {func(m *ipc.Register) {
			m.HashTokens = 1
			for _, n := range []uint32{1021, 1019, 1013, 1009} {
				m.Groups = append(m.Groups, ipc.GroupDesc{BlockTokens: n, NumBlocks: 1})
			}
		}, "least common multiple"},
		"lookup slash": {func(m *ipc.Register) { m.LookupName = "a/b" },
			`lookup_name: "a/b", allowed is the name of a file`},
		"lookup dot": {func(m *ipc.Register) { m.LookupName = ".a" },
			"allowed is the name of a file without a leading dot"},
		"lookup path":        {func(m *ipc.Register) { m.LookupName = long[:100] }, "its path has"},
		"lookup session":     {func(m *ipc.Register) { m.LookupName = "session.sock" }, "is taken by the agent"},
		"lookup admin":       {func(m *ipc.Register) { m.LookupName = "admin.sock" }, "is taken by the agent"},
		"lookup own":         {func(m *ipc.Register) { m.LookupName = "lookup.sock" }, "is taken by the agent"},
		"lookup lock":        {func(m *ipc.Register) { m.LookupName = "a.lock" }, "is taken by the agent"},
		"worker no regions":  {func(m *ipc.Register) { m.Regions = 0 }, "regions: 0, allowed: 1 to 4096"},
		"worker no segments": {func(m *ipc.Register) { m.Segments = 0 }, "segments: 0, allowed: 1 to 65536"},
		"scheduler has rank": {func(m *ipc.Register) { m.Role, m.World, m.Rank = 0, 2, 1 },
			"rank: 1, allowed: 0 to 0"},
		"scheduler has regions": {func(m *ipc.Register) { m.Role, m.Held = 0, nil },
			"regions: 1, allowed: 0 to 0"},
	} {
		t.Run(name, func(t *testing.T) {
			m := register("a")
			m.Regions, m.Segments = 1, 1
			c.change(m)
			err := Check(m, "/run/kvagent")
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want one with %q", err, c.want)
			}
		})
	}
	m := register("a")
	m.Regions, m.Segments = 1, 1
	if err := Check(m, "/run/kvagent"); err != nil {
		t.Fatalf("a good one is refused: %v", err)
	}
}

func TestRegionAndSegmentRefusals(t *testing.T) {
	const size = 1 << 20
	regions := map[uint32]ipc.RegionDesc{0: {ID: 0, Kind: ipc.RegionFD, Size: size},
		1: {ID: 1, Kind: ipc.RegionPeer, Size: size, Addr: 4096}}
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"size zero":     {checkRegion(&ipc.RegionDesc{Kind: 1}), "region 0.size: 0, allowed: 1 to"},
		"size":          {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1 << 62}), "region 0.size"},
		"address":       {checkRegion(&ipc.RegionDesc{Kind: 2, Size: 1}), "region 0.addr"},
		"address wraps": {checkRegion(&ipc.RegionDesc{Kind: 2, Size: 1 << 40, Addr: 1<<47 - 1}), "region 0.addr"},
		"address of fd": {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1, Addr: 1}), "region 0.addr: 1, allowed: 0 to 0"},
		"handle": {checkRegion(&ipc.RegionDesc{Kind: 3, Size: 1, Handle: []byte{1}}),
			"handle: 1 bytes, allowed: 80"},
		"handle of fd": {checkRegion(&ipc.RegionDesc{Kind: 1, Size: 1, Handle: []byte{1}}),
			"handle: 1 bytes, allowed: 0"},
		"no region": {checkSegment(0, &ipc.SegmentDesc{Region: 9, Bytes: 1}, 1, regions),
			"segment 0.region: 9, allowed"},
		"bytes": {checkSegment(0, &ipc.SegmentDesc{}, 1, regions), "segment 0.bytes: 0, allowed: 1 to"},
		"stride": {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 7}, 2, regions),
			"segment 0.stride: 7, allowed: 8"},
		"past the end": {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 8, Offset: size - 15}, 2, regions),
			"allowed: inside of region 0"},
		"wraps": {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Stride: 1 << 63}, 3, regions),
			"allowed: inside of region 0"},
		"offset wraps": {checkSegment(0, &ipc.SegmentDesc{Bytes: 8, Offset: ^uint64(0) - 3}, 1, regions),
			"allowed: inside of region 0"},
		"sync region": {checkSync(&ipc.SyncDesc{Region: 9}, regions, false), "sync.region: 9, allowed"},
		"sync kind":   {checkSync(&ipc.SyncDesc{Region: 1}, regions, false), "is of kind 2, allowed: kind 1"},
		"step odd": {checkSync(&ipc.SyncDesc{StepOff: 4}, regions, false),
			"sync.step_off: 4, allowed: a multiple of 8"},
		"step past": {checkSync(&ipc.SyncDesc{StepOff: size}, regions, false), "sync.step_off"},
		"events past": {checkSync(&ipc.SyncDesc{EventsOff: size - 16, Events: 2}, regions, false),
			"sync.events_off"},
		"revokes wrap": {checkSync(&ipc.SyncDesc{RevokeOff: ^uint64(0) - 3, Revokes: 1}, regions, false),
			"sync.revoke_off"},
		"piece's handle": {checkRegion(&ipc.RegionDesc{Kind: 4, Size: 1, Handle: make([]byte, 64)}),
			"handle: 64 bytes, allowed: 16"},
		"offset too far": {checkRegion(&ipc.RegionDesc{Kind: 3, Size: 2, Addr: 1<<46 - 1, Handle: make([]byte, 80)}),
			"region 0.addr"},
		"offset of peer": {checkRegion(&ipc.RegionDesc{Kind: 4, Size: 1, Addr: 1, Handle: make([]byte, 16)}),
			"region 0.addr: 1, allowed: 0 to 0"},
		"GPU events": {checkSync(&ipc.SyncDesc{EventsOff: size - 32, Events: 1}, regions, true), "sync.events_off"},
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
