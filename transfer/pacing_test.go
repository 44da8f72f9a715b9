package transfer

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// still is a clock that a test moves.
type still struct {
	mu  sync.Mutex
	now time.Time
}

func (c *still) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *still) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// paced is a station whose saves owe their pacer more than a test lasts, on a clock that stands
// still.
func paced(t *testing.T, change func(*Config)) (*station, *still) {
	t.Helper()
	clock := &still{now: time.Unix(1000, 0)}
	p := pace.New(pace.MinRate, clock.Now)
	p.Begin(pace.Save, 100*pace.MinRate)
	p.Ended(pace.Save)
	s := newNode(t, 64).join(t, func(c *Config) {
		c.Pacer = p
		if change != nil {
			change(c)
		}
	})
	return s, clock
}

// revocable returns a save with the first revocation word.
func revocable(id uint64, sections ...Section) Job {
	j := save(id, sections...)
	j.Revoke = 0
	return j
}

// TestPacedSaveWaits expects a save to wait for its budget without a lane, and to end when there is
// room.
func TestPacedSaveWaits(t *testing.T) {
	s, clock := paced(t, nil)
	s.write(0, 7)
	s.submit(revocable(1, section(0, 2, 0)))
	s.reaches(Save, WaitingPace, "a save beyond its budget")
	if s.stored(0, 2) != 0 || s.lanes.mu.free != 2 {
		t.Errorf("%d blocks are stored, %d lanes free, while the save waits", s.stored(0, 2), s.lanes.mu.free)
	}
	clock.pass(time.Minute)
	s.ends(1, pool.OK)
	if s.stored(0, 2) != 2 {
		t.Errorf("%d blocks are stored", s.stored(0, 2))
	}
}

// TestLoadsPassPacedSaves expects a load that comes after a save that waits to end before it.
func TestLoadsPassPacedSaves(t *testing.T) {
	s, clock := paced(t, nil)
	s.finish(save(1, section(0, 2, 0)), pool.OK)
	s.submit(revocable(2, section(10, 2, 2)))
	s.reaches(Save, WaitingPace, "a save beyond its budget")
	s.finish(load(3, section(0, 2, 8)), pool.OK)
	clock.pass(time.Minute)
	s.ends(2, pool.OK)
}

// TestPacedSaveEnds expects a save that waits for its budget to end when it is cancelled, when it
// is revoked, when its worker is closed, and when the pacer ends.
func TestPacedSaveEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(*station)
		want pool.Status
	}{
		"cancelled": {func(s *station) { s.worker.Cancel(1) }, Cancelled},
		"revoked":   {func(s *station) { s.engine.Revoke(0) }, Revoked},
		"closed":    {func(s *station) { s.worker.Close() }, Cancelled},
		"ended":     {func(s *station) { s.worker.cfg.Pacer.End() }, pool.OK},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := paced(t, nil)
			s.submit(revocable(1, section(0, 2, 0)))
			s.reaches(Save, WaitingPace, "a save beyond its budget")
			c.end(s)
			s.ends(1, c.want)
			if want := map[bool]int{true: 2}[c.want == pool.OK]; s.stored(0, 2) != want {
				t.Errorf("%d blocks are stored, want %d", s.stored(0, 2), want)
			}
		})
	}
}

// TestUrgentSavesAreNotPaced expects a save that cannot be revoked, and one that somebody waits
// for, to end whatever the budget is; also if that begins while it waits.
func TestUrgentSavesAreNotPaced(t *testing.T) {
	s, _ := paced(t, nil)
	s.finish(save(1, section(0, 2, 0)), pool.OK)
	var mu sync.Mutex
	awaited := true
	s, _ = paced(t, func(c *Config) {
		c.Awaited = func() bool {
			mu.Lock()
			defer mu.Unlock()
			return awaited
		}
	})
	set := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		awaited = v
	}
	s.finish(revocable(1, section(0, 2, 0)), pool.OK)
	set(false)
	s.submit(revocable(2, section(10, 2, 2)))
	s.reaches(Save, WaitingPace, "a save that nobody waits for any more")
	set(true)
	s.ends(2, pool.OK)
}

// sizes is a peer that records the bytes of each copy.
type sizes struct {
	cudaipc.Peer
	mu    sync.Mutex
	bytes []int
}

func (d *sizes) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	n := 0
	for i := range c.Runs {
		n += int(c.Runs[i].Len)
	}
	d.mu.Lock()
	d.bytes = append(d.bytes, n)
	d.mu.Unlock()
	return d.Peer.Copy(c)
}

// TestPacedBatches expects a save under a limit to be copied in small batches, each in its time,
// and one without a limit in large ones.
func TestPacedBatches(t *testing.T) {
	const many = 192 // blocks of 16 KiB
	for _, limited := range []bool{false, true} {
		clock := &still{now: time.Unix(1000, 0)}
		setting := pace.Auto
		if limited {
			setting = 64 << 20
		}
		p := pace.New(setting, clock.Now)
		var device *sizes
		s := newNode(t, many).join(t, func(c *Config) {
			device = &sizes{Peer: c.Peer}
			c.Peer, c.Pacer = device, p
		})
		s.submit(revocable(1, section(0, many, 0)))
		if limited {
			begin := clock.Now()
			devicetest.Until(t, "the end of a paced save", func() bool {
				clock.pass(time.Millisecond)
				return len(s.done) > 0
			})
			if took, least := clock.Now().Sub(begin), time.Second*many*blockSize/(64<<20); took < least*3/4 {
				t.Errorf("a save took %v, its budget gives it at least %v", took, least)
			}
		}
		s.ends(1, pool.OK)
		device.mu.Lock()
		most := slices.Max(device.bytes)
		device.mu.Unlock()
		if limited != (most <= 256<<10) {
			t.Errorf("limited %v: copies of up to %d bytes", limited, most)
		}
	}
}

// TestPacerSeesCopies expects the pacer to know when copies ran: a step beside a save, beside a
// load, and alone.
func TestPacerSeesCopies(t *testing.T) {
	clock := &still{now: time.Unix(1000, 0)}
	p := pace.New(pace.Auto, clock.Now)
	var g *gate
	s := newNode(t, 64).join(t, func(c *Config) {
		g = newGate()
		g.before(c)
		c.Pacer = p
	})
	engine := p.Engine()
	step := func() {
		begin := clock.Now()
		clock.pass(20 * time.Millisecond)
		engine.Steps([]pace.Step{{Begin: begin, End: clock.Now(), Requests: 1}})
		clock.pass(10 * time.Millisecond)
	}
	step()
	s.submit(revocable(1, section(0, 2, 0)))
	g.during(s, "a save in flight", step)
	g.open()
	s.ends(1, pool.OK)
	clock.pass(10 * time.Millisecond)
	step()
	if n := p.Report().Counts; n.Alone != 2 || n.Beside != 1 || n.Other != 0 {
		t.Errorf("steps: %+v", n)
	}
}

// TestPacerSeesStagedLoads expects the pacer to know when the copies of a staged load ran, of one
// that arrives, one whose copy the device refuses, and one that is cancelled: steps beside them are
// neither alone nor beside saves, and those afterwards are alone.
func TestPacerSeesStagedLoads(t *testing.T) {
	clock := &still{now: time.Unix(1000, 0)}
	p := pace.New(pace.Auto, clock.Now)
	engine := p.Engine()
	step := func() {
		begin := clock.Now()
		clock.pass(20 * time.Millisecond)
		engine.Steps([]pace.Step{{Begin: begin, End: clock.Now(), Requests: 1}})
		clock.pass(10 * time.Millisecond)
	}
	n := newNode(t, 64)
	g := &stageGate{before: func(int, *cudaipc.Copy) { step() }}
	s := n.join(t, func(c *Config) {
		g.Peer, c.Peer, c.Pacer, c.Limits = c.Peer, g, p, DefaultLimits
		c.Limits.Batches = 1
	})
	s.fill(0, 4)
	clock.pass(10 * time.Millisecond)
	loads := func(what string, want pool.Status, copies uint64) {
		t.Helper()
		before := p.Report().Counts
		g.copies.Store(0)
		s.submit(s.staged(2, stageOrder, section(0, 4, 100)))
		if c := s.completion(); !slices.Contains(c.Status, want) {
			t.Errorf("%s: statuses %v, want %d among them", what, c.Status, want)
		}
		clock.pass(10 * time.Millisecond)
		step()
		now := p.Report().Counts
		alone, beside, other := now.Alone-before.Alone, now.Beside-before.Beside, now.Other-before.Other
		if alone != 1 || beside != 0 || other != copies {
			t.Errorf("%s: %d steps alone, %d beside saves, %d beside loads, want 1, 0, %d", what, alone, beside,
				other, copies)
		}
	}
	loads("a load", pool.OK, stageCount)
	g.before = func(_ int, c *cudaipc.Copy) {
		step()
		c.Runs[0].Region = 9 // which is not there
	}
	loads("a load that fails", Failed, 1)
	g.before = func(n int, _ *cudaipc.Copy) {
		step()
		if n == 1 {
			s.worker.Cancel(2)
		}
	}
	loads("a load that is cancelled", Cancelled, 2)
}
