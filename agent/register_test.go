package agent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

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
		if st := r.guests.Status(); st.Regions != 0 {
			t.Fatalf("%d regions are open before all parts have come", st.Regions)
		}
		c.send(&ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{
			Offset: i * testBlockBytes / pieces, Stride: testBlockBytes, Bytes: testBlockBytes / pieces,
		}}})
	}
	answer := c.registered(next[*ipc.Registered](c))
	if answer.Epoch != 1 || answer.LookupPath != r.path(socketdir.Lookup) || answer.Space != m.Space() {
		t.Errorf("REGISTERED %+v", answer)
	}
	c.fill(3, 9)
	if got := c.save(1, chain(1, 1), 3); !all(got, blockOK) {
		t.Fatalf("save %v", got)
	}
	if got := c.load(1, 0, chain(1, 1), 5); !all(got, blockOK) || !c.filled(5, 9) {
		t.Fatalf("load %v", got)
	}
}

// An invalid part refuses the registration and leaves nothing open, and the session may try
// again.
func TestRefusedPartsLeaveNothing(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	for name, change := range map[string]func(*ipc.Register, *ipc.Regions, *ipc.Segments){
		"region twice":    func(_ *ipc.Register, g *ipc.Regions, _ *ipc.Segments) { g.List[1].ID = g.List[0].ID },
		"segment outside": func(_ *ipc.Register, _ *ipc.Regions, s *ipc.Segments) { s.List[0].Offset = 1 },
		"no such group":   func(_ *ipc.Register, _ *ipc.Regions, s *ipc.Segments) { s.Group = 1 },
		"sync outside":    func(m *ipc.Register, _ *ipc.Regions, _ *ipc.Segments) { m.Sync.EventsOff = 1 << 30 },
		"too many": func(m *ipc.Register, _ *ipc.Regions,
			s *ipc.Segments) {
			s.List = append(s.List, s.List[0])
		},
		"device says no": func(_ *ipc.Register, g *ipc.Regions, _ *ipc.Segments) { g.List[1].Size = 1 << 40 },
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
			if st := r.guests.Status(); st.Engines != 0 || st.Regions != 0 {
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
		"rank twice": {func(m *ipc.Register) { m.Instance = "first" }, 0,
			`rank 0 of instance "first" is already registered by process`},
		"other world": {func(m *ipc.Register) { m.Instance, m.World = "first", 3 }, 0, "world: 3, allowed: 2"},
		"other identity": {func(m *ipc.Register) { m.Instance, m.Identity[1].Value = "first", "x" }, 0,
			"identity: not that of the other sessions"},
		"other size": {func(*ipc.Register) {}, 2048,
			"segments: group 0, shard 0: 2048 bytes of one block, allowed: 4096"},
		"name of another": {func(m *ipc.Register) { m.Identity[1].Value, m.LookupName = "x", "look" }, 0,
			`lookup_name: "look" is held for the space`},
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
	if got := a.save(1, chain(1, 2), 0); !all(got, blockBusy) {
		t.Errorf("save %v, want busy", got)
	}
	if got := a.load(1, 0, chain(1, 2), 0); !all(got, blockMissing) {
		t.Errorf("load %v, want missing", got)
	}
	a.send(&ipc.Reset{Req: 3})
	if got := next[*ipc.ResetDone](a); got.Status != ipc.RegDone || got.Epoch != 2 {
		t.Errorf("reset %+v, want epoch 2", got)
	}
	b := r.dial()
	two := *reg
	two.Rank, two.Held = 1, []uint32{1}
	if answer := b.registered(b.registerWorker(&two)); answer.Epoch != 2 {
		t.Errorf("epoch %d, want the 2 of the reset before the space opened", answer.Epoch)
	}
	if got := a.save(1, chain(1, 2), 0); !all(got, blockStale) {
		t.Errorf("save with the old epoch %v, want stale", got)
	}
	if got := a.save(2, chain(1, 2), 0); !all(got, blockOK) {
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
	if st := r.guests.Status(); st.Regions != 0 {
		t.Fatalf("%d regions are open after UNREGISTERED", st.Regions)
	}
	if got := w[0].save(1, chain(1, 1), 0); !all(got, blockInvalid) {
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

// slowImports is a device whose imports end when they are told that their peer is gone, and not
// before.
type slowImports struct {
	cudaipc.Device
	t     *testing.T
	begun chan struct{}
}

func (d slowImports) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	d.begun <- struct{}{}
	select {
	case <-im.Cancelled:
	case <-time.After(patience):
		d.t.Error("an import is not told that its engine is gone")
	}
	return d.Device.Import(im) // may come to its end all the same
}

// An engine that dies, or hangs up, while its memory is being imported does not keep the agent
// waiting for that.
func TestDeathDuringImport(t *testing.T) {
	for name, leave := range map[string]func(r *rig) func(){
		"killed": func(r *rig) func() {
			cmd, _ := r.startVictim("importing")
			return func() { check(r.t, cmd.Process.Kill()) }
		},
		"hung up": func(r *rig) func() {
			c := r.dial()
			c.sendRegistration(register("engine"))
			return c.close
		},
		"says no more": func(r *rig) func() {
			c := r.dial()
			c.sendRegistration(register("engine"))
			return func() { check(r.t, c.conn.CloseWrite()) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			slow := slowImports{t: t, begun: make(chan struct{}, 1)}
			r := newRig(t, withDevice(func(d cudaipc.Device) cudaipc.Device {
				slow.Device = d
				return slow
			}))
			end := leave(r)
			<-slow.begun
			end()
			r.waitFor("the engine is gone",
				func(s admin.Status) bool { return s.Sessions == 0 && s.Regions == 0 && s.Engines == 0 })
		})
	}
}

// sendRegistration sends all parts of a worker's registration.
func (c *client) sendRegistration(m *ipc.Register) {
	c.t.Helper()
	regions, fds, segments := c.prepare(m)
	c.send(m)
	c.send(regions, fds...)
	c.send(segments)
}
