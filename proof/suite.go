package proof

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// Tests of the suite of devices.
var (
	memoryTests = []string{"ImportAndClose", "ImportRefuses", "BytesBothWays", "OddFragments", "SumsAreCRC32C",
		"CopiesAreOrdered", "OutOfRange", "AnotherPeersRegion", "SamplesAreOfTheEngine"}
	orderTests = []string{"EventsAndSteps", "EventRecordedAgain", "StaleWithoutWaiting", "RevocationWords",
		"WordsAreWritten"}
)

// suite runs tests of the suite of devices, each on the GPU opened anew.
func (b *bench) suite(kind cudaipc.Kind, names []string) {
	for _, name := range names {
		b.part(func() { devicetest.Run(b, devicetest.CUDA(b, devicetest.MinArena, kind, nil), name) })
		if b.Failed() {
			b.Fatalf("in the suite's test %s", name)
		}
	}
}

// checkImport runs the suite's tests of memory in both of its forms, also at an offset in its
// allocation, and measures an import.
func checkImport(b *bench) {
	for _, form := range []struct {
		name string
		kind cudaipc.Kind
	}{{"handle", cudaipc.KindCUDA}, {"virtual", cudaipc.KindCUDAFD}} {
		b.suite(form.kind, memoryTests)
		b.part(func() {
			n := b.sizes.open
			f := devicetest.CUDA(b, devicetest.MinArena, form.kind, nil)
			e := f.Engine(b, devicetest.Spec{Regions: []int64{n, n}, Piece: b.sizes.piece})
			im, err := e.Import()
			b.must(err)
			begin := time.Now()
			devicetest.Import(b, f.Device, im)
			ms := float64(time.Since(begin)) / float64(time.Millisecond)
			b.line.Figures[form.name+"_import_ms"] = ms
			b.line.say("%s: %d tests hold for every byte, %d MiB opened in %.1f ms", form.name, len(memoryTests),
				2*n>>20, ms)
		})
	}
}

// checkOrder runs the suite's tests of steps and events: a copy that does not wait gets old bytes,
// and one that waits gets the step's.
func checkOrder(b *bench) {
	b.suite(cudaipc.KindCUDA, orderTests)
	b.line.say("%d tests of steps and events hold: without the wait a copy has old bytes, with it the step's",
		len(orderTests))
}

// killed is an engine whose memory and death are noted.
type killed struct {
	devicetest.Engine
	die func()
}

func (k killed) Kill() {
	k.die()
	k.Engine.Kill()
}

// dies runs a test of the suite that kills engines, each with two more regions of memory, and
// reports when all of it is free again after the last death.
func (b *bench) dies(kind cudaipc.Kind, name string) {
	f := devicetest.CUDA(b, devicetest.MinArena, kind, nil)
	d := f.Device.(*cuda.Device)
	devicetest.Pinned(b, d)
	before, more := b.free(d), 2*b.sizes.region
	var death time.Time
	start := f.Engine
	f.Engine = func(t devicetest.T, s devicetest.Spec) devicetest.Engine {
		s.Regions, s.Piece = append(s.Regions, more), b.sizes.piece
		return killed{start(t, s), func() {
			if held := before - d.Info().Free; held < more {
				b.Fatalf("an engine with %d bytes holds %d", more, held)
			}
			death = time.Now()
		}}
	}
	devicetest.Run(b, f, name)
	b.back(d, before, death)
}

func checkEngineKilled(b *bench) { b.dies(cudaipc.KindCUDA, "DeathWhileCopying") }

func checkWarmUpKilled(b *bench) { b.dies(cudaipc.KindCUDAFD, "DeathDuringImport") }

// checkAgentKilled kills a mover that copies an engine's memory: the engine's memory stays
// unchanged, and the mover's is free again.
func checkAgentKilled(b *bench) {
	n := b.sizes.region
	f, d := b.gpu(devicetest.MinArena, "")
	e := f.Engine(b, devicetest.Spec{Regions: []int64{n}})
	_, err := e.Do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: n, Seed: 3})
	b.must(err)
	before := b.free(d)
	m, p := b.mover(d, n, e)
	var tickets []cudaipc.Ticket
	for range inFlight {
		t, err := p.Copy(gather(cudaipc.Run{Region: 1, Len: uint32(n)}))
		b.must(err)
		tickets = append(tickets, t)
	}
	death := time.Now()
	b.must(unix.Kill(m.Movers()[0].PID, unix.SIGKILL))
	for _, t := range tickets {
		if _, ok, err := t(devicetest.WaitLimit); err != nil || !ok {
			b.Fatalf("a copy did not end with its mover: %v", err)
		}
	}
	b.must(p.Close())
	b.must(m.Close()) // no other process takes its place
	b.back(d, before, death)
	got, err := e.Do(devicetest.Op{Kind: devicetest.Read, Region: 1, Len: n})
	b.must(err)
	bad := wrong(got, 3)
	b.line.Figures["engine_wrong_bytes"] = float64(bad)
	b.line.say("the engine goes on, %d of its bytes wrong", bad)
	if bad > 0 {
		b.Fatalf("%d bytes of the engine are wrong after the agent's death", bad)
	}
}

// gather returns a copy of one run to the arena.
func gather(run cudaipc.Run) *cudaipc.Copy {
	return &cudaipc.Copy{Dir: cudaipc.Gather, Runs: []cudaipc.Run{run}, Blocks: []cudaipc.Block{{Runs: 1}}}
}

// wrong counts the bytes that differ from the pattern of a seed.
func wrong(p []byte, seed uint64) (n int) {
	want := make([]byte, len(p))
	devicetest.Pattern(want, seed, 0)
	for i := range p {
		if p[i] != want[i] {
			n++
		}
	}
	return n
}

// mover starts a mover of the GPU with an arena of size bytes, imports an engine, and
// returns both when the arena is pinned.
func (b *bench) mover(d *cuda.Device, size int64, e devicetest.Engine) (m *mover.Mover, p cudaipc.Peer) {
	o, pinned := b.informed()
	m, _ = devicetest.OpenMover(b, size, func(of *mover.Options) {
		o.ArenaFD, o.ArenaSize = of.ArenaFD, of.ArenaSize
		*of = o.ForGPU(d.Info().GPU)
	})
	b.Cleanup(func() { _ = m.Close() }) // again, if the check has closed it
	im, err := e.Import()
	b.must(err)
	p = devicetest.Import(b, m, im)
	pinned()
	return m, p
}

// informed returns options of a mover, and a function that waits until its arena is pinned.
func (b *bench) informed() (mover.Options, func()) {
	var info atomic.Pointer[cudaipc.CUDAInfo]
	return mover.Options{Informed: func(i cudaipc.CUDAInfo) { info.Store(&i) }}, func() {
		devicetest.Until(b, "the arena is pinned", func() bool { i := info.Load(); return i != nil && i.PinDone })
		b.pinned(*info.Load())
	}
}

// checkFootprint measures how much of the GPU's memory an agent's mover takes for itself.
func checkFootprint(b *bench) {
	f, d := b.gpu(devicetest.MinArena, "")
	e := f.Engine(b, devicetest.Spec{Regions: []int64{1 << 20}})
	before := b.free(d)
	b.mover(d, b.sizes.region, e)
	taken := float64(before-b.free(d)) / (1 << 20)
	b.line.Figures["agent_mib"] = taken
	b.line.say("an agent's mover takes %.0f MiB of the GPU", taken)
}

// The next checks find out what the driver does where the reference leaves it open. The agent
// relies on neither ending. Losing the device is a third one, after which the mover is replaced.

// checkEventAfterDeath finds out whether the pending event of a killed process fires.
func checkEventAfterDeath(b *bench) {
	f, _ := b.gpu(devicetest.MinArena, "")
	// With the process's number the device would not ask the event.
	c := devicetest.Start(b, f.WithoutPid(), devicetest.Spec{Regions: []int64{1 << 20}, Events: 1})
	c.Do(devicetest.Op{Kind: devicetest.Hold})
	c.Do(devicetest.Op{Kind: devicetest.Record})
	event := cudaipc.Wait{Event: 0, Revoke: cudaipc.None}
	if c.Poll(event).Fired {
		b.Fatal("an event after a waiting stream has fired")
	}
	c.Kill()
	fact, death := "never fires", time.Now()
	for fact == "never fires" && time.Since(death) < deadEvent {
		if state, err := c.Peer.Poll(event); err != nil {
			fact = err.Error()
		} else if state.Fired {
			fact = "fires"
		}
		time.Sleep(lookEvery)
	}
	b.line.Facts["event"] = fact
	b.line.say("the event of a killed process: %s", fact)
}

// inFlight is how many copies of a region are submitted before a process is killed: a quarter of a
// second at 30 GiB/s.
const inFlight = 16

// checkCopyAfterDeath finds out how copies in flight end when the process of their memory is
// killed.
func checkCopyAfterDeath(b *bench) {
	n := b.sizes.region
	last := min(n, devicetest.MinArena) // bytes of the last copy, to a place of its own
	f, _ := b.gpu(n+devicetest.MinArena, "")
	// With the process's number the device would not trust its copies.
	c := devicetest.Start(b, f.WithoutPid(), devicetest.Spec{Regions: []int64{n}})
	c.Do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: n, Seed: 5})
	var tickets []cudaipc.Ticket
	for range inFlight {
		tickets = append(tickets, c.Submit(gather(cudaipc.Run{Region: 1, Len: uint32(n)})))
	}
	tickets = append(tickets, c.Submit(gather(cudaipc.Run{Region: 1, ArenaOff: n, Len: uint32(last)})))
	c.Kill()
	good, fact := 0, ""
	for _, t := range tickets {
		end, ok, err := t(devicetest.WaitLimit)
		switch {
		case errors.Is(err, cudaipc.ErrLost):
			fact = err.Error()
		case err != nil || !ok:
			b.Fatalf("a copy from a dead process's memory did not end within %v: %v", devicetest.WaitLimit, err)
		case end.Bad == nil:
			good++
		}
	}
	if fact == "" {
		fact = fmt.Sprintf("%d of %d end without an error, and of the last one %d of %d bytes did not arrive", good,
			len(tickets), wrong(f.Arena[n:n+last], 5), last)
	}
	b.line.Facts["copy"] = fact
	b.line.say("copies from the memory of a killed process: %s", fact)
}
