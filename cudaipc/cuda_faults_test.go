//go:build cuda

package cudaipc_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// fullFaults in the environment makes the tests of faults fail and hang every call of every function: minutes.
const fullFaults = "KVAGENT_FAULTS_FULL"

// faultPlan is what one mover does in these tests: it opens a GPU, imports an engine, asks its event, copies both ways by each of the
// paths, and closes. Its result is how far that went.
type faultPlan struct {
	*moved
	pattern []byte
}

// eachPath is a table that sends runs of these lengths by the kernel, by batches, by rectangles and one by one.
var eachPath = []cudaipc.CopyRule{
	{UpTo: 64, Flat: cudaipc.CopyKernel, Rows: cudaipc.CopyKernel},
	{UpTo: 1500, Flat: cudaipc.CopyBatch, Rows: cudaipc.CopyBatch},
	{UpTo: 4096, Flat: cudaipc.CopyBatch, Rows: cudaipc.CopyRect},
	{UpTo: math.MaxUint64, Flat: cudaipc.CopySingle, Rows: cudaipc.CopySingle},
}

// softGPU is what the double calls its GPUs.
const softGPU = "Software CUDA device 0"

// ownMachine gives the test a pretended machine of its own.
func ownMachine(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Setenv("SOFTCUDA_DIR", dir)
}

// newMovedCUDA is newMoved with a GPU in the mover, whose environment has env besides; tables may be nil.
func newMovedCUDA(t *testing.T, rules []cudaipc.CopyRule, env ...string) *moved {
	t.Helper()
	m := &moved{t: t, lost: map[cudaipc.PeerID][]error{}}
	f := devicetest.MoverFixture(t, devicetest.MinArena, cudaipc.KindFD, false, func(o *cudaipc.MoverOptions) {
		o.Device, o.Limits = cudaipc.CUDADevice, quick
		o.Env = append(slices.Clone(o.Env), env...)
		if rules != nil {
			o.Tables = []cudaipc.CopyTable{{GPU: softGPU, Rules: rules}}
		}
	})
	m.mover, m.arena = f.Device.(*cudaipc.Mover), f.Arena
	m.mover.Watch(func(id cudaipc.PeerID, err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.lost[id] = append(m.lost[id], err)
	})
	m.engine = devicetest.CUDAEngine(t, devicetest.Spec{Regions: []int64{movedSize, movedSize}, Events: 1, Revokes: 1}, cudaipc.KindCUDA)
	for _, op := range []devicetest.Op{
		{Kind: devicetest.Fill, Region: 1, Len: movedSize, Seed: 3}, {Kind: devicetest.SetStep, Step: 4}, {Kind: devicetest.Record},
		{Kind: devicetest.Synchronize},
	} {
		if _, err := m.engine.Do(op); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// pinned waits until the mover says that nothing more will be pinned, or is gone.
func (m *moved) pinned() {
	m.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) { // a pause between two looks
		if m.info().PinDone || m.mover.Movers()[0].Pid == 0 {
			return
		}
	}
	m.t.Fatal("the arena is not pinned, nor refused")
}

// info is what the mover's device said last.
func (m *moved) info() (info cudaipc.CUDAInfo) {
	_ = json.Unmarshal(m.mover.Movers()[0].Info, &info) // it said nothing yet
	return info
}

// eachPathCopy is blocks with runs for each path, from and to the same offsets.
func eachPathCopy(dir cudaipc.Direction) *cudaipc.Copy {
	const blocks, size = 4, movedSize / 4
	c := &cudaipc.Copy{Peer: 1, Dir: dir, Sum: true}
	for b := range int64(blocks) {
		runs := len(c.Runs)
		add := func(off int64, n uint32) {
			c.Runs = append(c.Runs, cudaipc.Run{Region: cudaipc.RegionID(dir) + 1, RegionOff: uint64(b*size + off), ArenaOff: b*size + off, Len: n})
		}
		for i := range int64(5) {
			add(i*i*50, uint32(40+i))                // kernel
			add(8192+i*i*1600, uint32(1000+i))       // batch
			add(65536+i*4096, 2000)                  // rect
			add(131072+i*i*20480, uint32(20000+i*8)) // single
		}
		c.Blocks = append(c.Blocks, cudaipc.Block{Runs: uint32(len(c.Runs) - runs)})
	}
	return c
}

// copies does a copy and holds its good blocks against what they must be. It gives why blocks are bad.
func (p *faultPlan) copies(dir cudaipc.Direction, there func() []byte) error {
	p.t.Helper()
	c := eachPathCopy(dir)
	ticket, err := p.mover.Copy(c)
	if err != nil {
		return err
	}
	d := p.done(ticket)
	got, run := there(), 0
	for b := range c.Blocks {
		for range c.Blocks[b].Runs {
			r := &c.Runs[run]
			run++
			to := r.RegionOff + uint64(r.Len)
			if (d.Bad == nil || !d.Bad[b]) && !bytes.Equal(got[r.RegionOff:to], p.pattern[r.RegionOff:to]) {
				p.t.Fatalf("direction %d: block %d is said to have arrived, and %d bytes at %d are wrong", dir, b, r.Len, r.RegionOff)
			}
		}
	}
	return d.Err
}

func (p *faultPlan) gather() error {
	clear(p.arena[:movedSize])
	return p.copies(cudaipc.Gather, func() []byte { return p.arena })
}

func (p *faultPlan) scatter() error {
	copy(p.arena, p.pattern)
	if _, err := p.engine.Do(devicetest.Op{Kind: devicetest.Fill, Region: 2, Len: movedSize, Seed: 9}); err != nil {
		p.t.Fatal(err)
	}
	return p.copies(cudaipc.Scatter, func() []byte {
		data, err := p.engine.Do(devicetest.Op{Kind: devicetest.Read, Region: 2, Len: movedSize})
		if err != nil {
			p.t.Fatal(err)
		}
		return data
	})
}

func (p *faultPlan) ask() error {
	var s [1]cudaipc.State
	err := p.mover.Poll([]cudaipc.Wait{{Peer: 1, Revoke: cudaipc.None, Step: 4}}, s[:])
	if err == nil && !s[0].Fired {
		p.t.Fatal("an event that has fired is said not to have")
	}
	return err
}

// faultEnd is where a mover met its fault, and with what.
type faultEnd struct {
	step string // "": nowhere
	err  error
}

// run goes as far as it can.
func (p *faultPlan) run() faultEnd {
	p.t.Helper()
	if err := p.mover.Import(p.imports(1)); err != nil {
		return faultEnd{"import", err}
	}
	p.pinned()
	for _, step := range []struct {
		name string
		do   func() error
	}{{"poll", p.ask}, {"gather", p.gather}, {"scatter", p.scatter}, {"close", func() error { return p.mover.Close(1) }}} {
		if err := step.do(); err != nil {
			return faultEnd{step.name, err}
		}
	}
	return faultEnd{}
}

// faultRun is a run of a mover whose driver has a fault. It cleans up so that the fixture can close the mover.
func faultRun(t *testing.T, env ...string) (*faultPlan, faultEnd) {
	t.Helper()
	p := &faultPlan{moved: newMovedCUDA(t, eachPath, env...), pattern: pattern(3, movedSize)}
	end := p.run()
	t.Logf("%q: %v", end.step, end.err)
	return p, end
}

// again says that what comes after the fault works: in the same mover, or in the next one.
func (p *faultPlan) again(end faultEnd) {
	p.t.Helper()
	if end.step != "import" && end.step != "" {
		for err := error(nil); ; time.Sleep(time.Millisecond) { // a lost mover is reaped soon
			if err = p.mover.Close(1); !errors.Is(err, cudaipc.ErrBusy) {
				break
			}
		}
	}
	p.attach(1)
	p.pinned()
	for name, step := range map[string]func() error{"poll": p.ask, "gather": p.gather, "scatter": p.scatter} {
		if err := step(); err != nil {
			p.t.Errorf("%s behind the fault: %v", name, err)
		}
	}
	if err := p.mover.Close(1); err != nil {
		p.t.Errorf("close behind the fault: %v", err)
	}
}

// noteCalls has this process's driver note its calls from now on. What it gives counts them by function, without _v2.
func noteCalls(t *testing.T) func() map[string]int {
	list := filepath.Join(t.TempDir(), "calls")
	t.Setenv("SOFTCUDA_CALLS", list)
	return func() map[string]int { return readCalls(t, list) }
}

func readCalls(t *testing.T, list string) map[string]int {
	t.Helper()
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	times := map[string]int{}
	for name := range strings.Lines(string(text)) {
		times[strings.TrimSuffix(strings.TrimSpace(name), "_v2")]++
	}
	return times
}

// called is how often the mover calls each function of the driver in a run without a fault.
func called(t *testing.T) map[string]int {
	t.Helper()
	list := filepath.Join(t.TempDir(), "calls")
	p, end := faultRun(t, "SOFTCUDA_CALLS="+list)
	if end.step != "" {
		t.Fatalf("without a fault: %s: %v", end.step, end.err)
	}
	if err := p.mover.Close(cudaipc.AllPeers); err != nil { // so that its last calls are made
		t.Fatal(err)
	}
	return readCalls(t, list)
}
