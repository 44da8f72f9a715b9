//go:build cuda

package mover_test

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// fullFaults in the environment makes the tests of faults fail and hang every call of every
// function: minutes.
const fullFaults = "KVAGENT_FAULTS_FULL"

// faultPlan is what one mover does in these tests: it opens a GPU, imports an engine, asks its
// event, copies both ways by each of the paths, and closes. Its result is how far it
// got.
type faultPlan struct {
	*fixture
	pattern []byte
}

func pattern(seed uint64, n int) []byte {
	p := make([]byte, n)
	devicetest.Pattern(p, seed, 0)
	return p
}

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

// hung returns limits that a test can wait for: the one of the step in which a call hangs, and of
// all where that is not known.
func hung(step string) mover.Limits {
	l := longLimits
	switch step {
	case "import":
		l.Import = time.Second
	case "poll":
		l.Poll = time.Second
	case "gather", "scatter", "sample":
		l.Copy = time.Second
	default:
		const some = 3 * time.Second
		l.Start, l.Ping, l.Import, l.Close, l.Poll, l.Copy = some, some, some, some, some, some
	}
	return l
}

// newCUDAFixture is newFixture with a GPU in the mover, whose environment has env besides, and one
// engine for all. The end of the mover may go wrong.
func newCUDAFixture(t *testing.T, engine devicetest.Engine, limits mover.Limits, env ...string) *fixture {
	t.Helper()
	m := &fixture{t: t, engine: engine, peers: map[int]cudaipc.Peer{}, lost: map[int][]error{}}
	m.mover, m.arena = devicetest.OpenMover(t, devicetest.MinArena, func(o *mover.Options) {
		o.Device, o.Limits = cudaipc.CUDADevice, limits
		o.Env = append(slices.Clone(o.Env), env...)
	})
	t.Cleanup(func() { _ = m.mover.Close() })
	return m
}

// faultEngine returns an engine whose first region has a pattern, and whose step 4 has ended.
func faultEngine(t *testing.T) devicetest.Engine {
	t.Helper()
	return faultEngineOf(t, cudaipc.KindCUDA)
}

func faultEngineOf(t *testing.T, kind cudaipc.Kind) devicetest.Engine {
	t.Helper()
	engine := devicetest.CUDAEngine(t, devicetest.Spec{
		Regions: []int64{regionSize, regionSize},
		Events:  1,
		Revokes: 1,
	}, kind)
	for _, op := range []devicetest.Op{
		{Kind: devicetest.Fill, Region: 1, Len: regionSize, Seed: 3}, {Kind: devicetest.SetStep, Step: 4},
		{Kind: devicetest.Record},
		{Kind: devicetest.Synchronize},
	} {
		if _, err := engine.Do(op); err != nil {
			t.Fatal(err)
		}
	}
	return engine
}

// pinned waits until the mover reports that the pinning has ended or hangs, or has died.
func (m *fixture) pinned() {
	m.t.Helper()
	devicetest.Until(m.t, "the pinning ends", func() bool {
		i := m.info()
		return i.PinDone || i.PinError != "" || m.mover.Movers()[0].PID == 0
	})
}

// info returns what the mover's device said last.
func (m *fixture) info() cudaipc.CUDAInfo { return *m.mover.Movers()[0].GPU }

// loneCopy returns a copy of one run, which is a single call, from and to the same offset.
func loneCopy(dir cudaipc.Direction) *cudaipc.Copy {
	return &cudaipc.Copy{
		Dir: dir, Sum: true, Blocks: []cudaipc.Block{{Runs: 1}},
		Runs: []cudaipc.Run{{Region: cudaipc.RegionID(dir) + 1, Len: 5000}},
	}
}

// eachPathCopy returns a copy of blocks with runs for both other paths, from and to the same
// offsets.
func eachPathCopy(dir cudaipc.Direction) *cudaipc.Copy {
	const blocks, size = 4, regionSize / 4
	c := &cudaipc.Copy{Dir: dir, Sum: true}
	for b := range int64(blocks) {
		runs := len(c.Runs)
		add := func(off int64, n uint32) {
			c.Runs = append(c.Runs, cudaipc.Run{
				Region:    cudaipc.RegionID(dir) + 1,
				RegionOff: uint64(b*size + off),
				ArenaOff:  b*size + off,
				Len:       n,
			})
		}
		for i := range int64(5) {
			add(8192+i*i*1600, uint32(1000+i+10*b)) // batch
			add(65536+i*4096, 2000)                 // rect
		}
		c.Blocks = append(c.Blocks, cudaipc.Block{Runs: uint32(len(c.Runs) - runs)})
	}
	return c
}

// copies does copies by each path and holds their good blocks against what they must be. It gives
// why blocks are bad.
func (p *faultPlan) copies(dir cudaipc.Direction, there func() []byte) error {
	p.t.Helper()
	for _, c := range []*cudaipc.Copy{eachPathCopy(dir), loneCopy(dir)} {
		ticket, err := p.peer(1).Copy(c)
		if err != nil {
			return err
		}
		d := p.done(ticket)
		if p.good(c, &d, there()); d.Err != nil {
			return d.Err
		}
	}
	return nil
}

// good fails the test if a block that is not bad is not what it must be.
func (p *faultPlan) good(c *cudaipc.Copy, d *cudaipc.Done, got []byte) {
	p.t.Helper()
	run := 0
	for b := range c.Blocks {
		for range c.Blocks[b].Runs {
			r := &c.Runs[run]
			run++
			to := r.RegionOff + uint64(r.Len)
			if (d.Bad == nil || !d.Bad[b]) && !bytes.Equal(got[r.RegionOff:to], p.pattern[r.RegionOff:to]) {
				p.t.Fatalf("direction %d: block %d is said to have arrived, and %d bytes at %d are wrong", c.Dir, b,
					r.Len, r.RegionOff)
			}
		}
	}
}

func (p *faultPlan) gather() error {
	clear(p.arena[:regionSize])
	return p.copies(cudaipc.Gather, func() []byte { return p.arena })
}

func (p *faultPlan) scatter() error {
	copy(p.arena, p.pattern)
	if _, err := p.engine.Do(devicetest.Op{Kind: devicetest.Fill, Region: 2, Len: regionSize, Seed: 9}); err != nil {
		p.t.Fatal(err)
	}
	return p.copies(cudaipc.Scatter, func() []byte {
		data, err := p.engine.Do(devicetest.Op{Kind: devicetest.Read, Region: 2, Len: regionSize})
		if err != nil {
			p.t.Fatal(err)
		}
		return data
	})
}

// sample sums the first region as two blocks of two pieces each.
func (p *faultPlan) sample() error {
	const half = regionSize / 2
	s := &cudaipc.Sample{
		Within: cudaipc.MaxSampleWait,
		Blocks: []cudaipc.SampleBlock{{Block: 0}, {Block: 1, Seed: 5}},
	}
	for i := range uint64(2) {
		s.Pieces = append(s.Pieces, cudaipc.Piece{Region: 1, Offset: i * half / 2, Stride: half, Bytes: half / 2})
	}
	ticket, err := p.peer(1).Sum(s)
	if err != nil {
		return err
	}
	d := p.done(ticket)
	for i, b := range s.Blocks {
		want := crc32.Update(b.Seed, crc32.MakeTable(crc32.Castagnoli), p.pattern[i*half:(i+1)*half])
		if (d.Bad == nil || !d.Bad[i]) && d.Sums[i] != want {
			p.t.Fatalf("block %d is said to have been summed, and its sum is %08x, not %08x", i, d.Sums[i], want)
		}
	}
	return d.Err
}

func (p *faultPlan) ask() error {
	s, err := p.peer(1).Poll(cudaipc.Wait{Revoke: cudaipc.None, Step: 4})
	if err == nil && !s.Fired {
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
	if err := p.imported(1, p.imports(1)); err != nil {
		return faultEnd{"import", err}
	}
	p.pinned()
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"poll", p.ask}, {"gather", p.gather}, {"scatter", p.scatter}, {"sample", p.sample},
		{"close", func() error { return p.peer(1).Close() }},
	} {
		if err := step.do(); err != nil {
			return faultEnd{step.name, err}
		}
	}
	return faultEnd{}
}

// faultRun returns a run of a mover whose driver has a fault. It cleans up so that the fixture can
// close the mover.
func faultRun(t *testing.T, engine devicetest.Engine, limits mover.Limits, env ...string) (*faultPlan, faultEnd) {
	t.Helper()
	p := &faultPlan{fixture: newCUDAFixture(t, engine, limits, env...), pattern: pattern(3, regionSize)}
	end := p.run()
	t.Logf("%q: %v", end.step, end.err)
	return p, end
}

// again checks that calls after the fault succeed, in the same mover or in the next one.
func (p *faultPlan) again(end faultEnd) {
	p.t.Helper()
	if end.step != "import" && end.step != "" {
		if err := p.peer(1).Close(); err != nil {
			p.t.Fatalf("close after the fault: %v", err)
		}
	}
	if end := p.run(); end.step != "" {
		p.t.Errorf("%s after the fault: %v", end.step, end.err)
	}
}

// called returns how often the mover calls each function of the driver in a run without a fault.
func called(t *testing.T, engine devicetest.Engine) map[string]int {
	t.Helper()
	list := filepath.Join(t.TempDir(), "calls")
	p, end := faultRun(t, engine, longLimits, "SOFTCUDA_CALLS="+list)
	if end.step != "" {
		t.Fatalf("without a fault: %s: %v", end.step, end.err)
	}
	if err := p.mover.Close(); err != nil { // so that its last calls are made
		t.Fatal(err)
	}
	return readCalls(t, list)
}

// The cost of a failure of each function, where a mover calls it for the first time. An import, a
// poll, a gather or a scatter answers with an error, once; after the other costs nothing works in
// that process.
const (
	costsNothing = "nothing" // it is done without
	costsStart   = "start"   // the device does not open, and says why to each import
	costsMover   = "mover"   // the state of copies in flight is unknown: the mover is replaced
	costsEnd     = "end"     // the end of the device says so, and the process ends
)

var costOf = map[string]string{
	"cuInit": costsStart, "cuDeviceGetCount": costsStart, "cuDeviceGet": costsStart, "cuDeviceGetName": costsStart,
	"cuDeviceGetUuid":      costsStart,
	"cuDeviceGetAttribute": costsStart, "cuDevicePrimaryCtxRetain": costsStart, "cuCtxSetCurrent": costsStart,
	"cuCtxGetStreamPriorityRange": costsStart, "cuStreamCreateWithPriority": costsStart, "cuMemHostAlloc": costsStart,
	"cuMemHostGetDevicePointer":  costsStart,
	"cuDevicePrimaryCtxSetFlags": costsNothing, "cuCtxSetLimit": costsNothing, "cuCtxGetLimit": costsNothing,
	"cuMemGetInfo": costsNothing, "cuGetProcAddress": costsNothing,
	"cuMemHostRegister":  costsNothing,
	"cuEventDestroy":     costsNothing,
	"cuIpcOpenMemHandle": "import", "cuMemGetAddressRange": "import", "cuIpcOpenEventHandle": "import",
	"cuEventQuery": "poll", "cuMemcpy2DAsync": "gather", "cuMemcpyBatchAsync": "gather",
	"cuMemcpyDtoHAsync": "gather", "cuMemcpyHtoDAsync": "scatter", "cuMemcpyDtoH": "sample",
	"cuMemGetAllocationGranularity": "import", "cuMemAddressReserve": "import",
	"cuMemImportFromShareableHandle": "import", "cuMemMap": "import",
	"cuMemSetAccess": "import", "cuMemRelease": "import",
	"cuMemUnmap": costsMover, "cuMemAddressFree": costsMover,
	"cuEventCreate": costsMover, "cuEventRecord": costsMover, "cuIpcCloseMemHandle": costsMover,
	"cuStreamDestroy": costsEnd, "cuMemFreeHost": costsEnd, "cuMemHostUnregister": costsEnd,
	"cuDevicePrimaryCtxRelease": costsEnd,
}

// holds reports whether a run met its fault as cost says.
func (p *faultPlan) holds(cost, name string, end faultEnd) {
	p.t.Helper()
	lost := p.mover.Movers()[0].Lost
	replaced := lost[cudaipc.LostDevice] == 1
	says := strings.NewReplacer("DtoH", "", "HtoD", "").Replace(name) // one name for all copies
	step := cost
	switch cost {
	case costsNothing:
		step = ""
	case costsStart:
		step = "import"
	case costsMover:
		step = end.step
	case costsEnd:
		step, end.err = "", p.mover.Close()
	}
	silent := cost != costsNothing && cost != costsMover && (end.err == nil || !strings.Contains(end.err.Error(), says))
	if replaced != (cost == costsMover) || end.step != step || silent {
		p.t.Errorf("its failure should cost %q: it went as far as %q: %v; losses %v", cost, end.step, end.err, lost)
	}
}

// TestCUDAFailures lets each function of the driver that a mover calls fail, once. It expects the
// job, the import or the close that met the failure to report it, or to do without; no wrong block
// to be reported as arrived; and the next call to work, unless the device cannot be opened at all.
func TestCUDAFailures(t *testing.T) {
	ownMachine(t)
	engine := faultEngine(t)
	first := called(t, engine)
	for _, name := range slices.Sorted(maps.Keys(first)) {
		t.Run(name, func(t *testing.T) { failsOnce(t, engine, name) })
	}
	engine = faultEngineOf(t, cudaipc.KindCUDAFD)
	for _, name := range slices.Sorted(maps.Keys(called(t, engine))) {
		if first[name] == 0 {
			t.Run(name, func(t *testing.T) { failsOnce(t, engine, name) })
		}
	}
}

func failsOnce(t *testing.T, engine devicetest.Engine, name string) {
	cost, known := costOf[name]
	if !known {
		t.Fatal("a mover calls it, and this test does not say what its failure costs")
	}
	p, end := faultRun(t, engine, longLimits, fmt.Sprintf("SOFTCUDA_FAIL=%s:1:1", name))
	p.holds(cost, name, end)
	if cost != costsStart && cost != costsEnd && cost != costsMover || name == "cuIpcCloseMemHandle" {
		p.again(end)
	}
}

// TestCUDAFailuresLater is TestCUDAFailures for later calls, and for errors that no call survives.
func TestCUDAFailuresLater(t *testing.T) {
	ownMachine(t)
	engine := faultEngine(t)
	times, most := called(t, engine), 1
	codes := []int{719}
	names := []string{"cuMemcpyDtoHAsync", "cuMemcpyDtoH", "cuMemcpy2DAsync", "cuEventQuery", "cuIpcOpenMemHandle"}
	if os.Getenv(fullFaults) != "" {
		most, codes, names = 6, []int{1, 2, 700, 719, 999}, slices.Sorted(maps.Keys(times))
	}
	for _, name := range names {
		for n := 1; n <= min(times[name], most); n++ {
			for _, code := range codes {
				t.Run(fmt.Sprintf("%s/%d/%d", name, n, code), func(t *testing.T) {
					p, end := faultRun(t, engine, longLimits, fmt.Sprintf("SOFTCUDA_FAIL=%s:%d:%d", name, n, code))
					if lost := p.mover.Movers()[0].Lost[cudaipc.LostDevice]; most == 1 && lost != 1 {
						t.Errorf("%d losses by a sticky error, want 1: %v", lost, end.err)
					}
				})
			}
		}
	}
}

// heldCopies has the double's copies wait.
type heldCopies struct {
	t    *testing.T
	file string
}

// holdCopies returns what a mover needs in its environment for that; nothing is held yet.
func holdCopies(t *testing.T) (h heldCopies, env string) {
	h = heldCopies{t, filepath.Join(t.TempDir(), "held")}
	return h, "SOFTCUDA_COPY_HELD=" + h.file
}

func (h heldCopies) hold() {
	if err := os.WriteFile(h.file, nil, 0o600); err != nil {
		h.t.Fatal(err)
	}
}

func (h heldCopies) letGo() {
	if err := os.Remove(h.file); err != nil {
		h.t.Fatal(err)
	}
}

// TestCUDACopiesOfTheDead kills an engine while copies of its memory are in flight; they finish, or
// end short without an error. It expects no block to count as arrived whose bytes are not there.
func TestCUDACopiesOfTheDead(t *testing.T) {
	ownMachine(t)
	for _, ending := range []string{"finish", "end"} {
		for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
			t.Run(fmt.Sprintf("%s/%d", ending, dir), func(t *testing.T) {
				list := filepath.Join(t.TempDir(), "calls")
				held, env := holdCopies(t)
				m := newCUDAFixture(t, faultEngine(t), longLimits, "SOFTCUDA_COPIES_ON_DEATH="+ending, env,
					"SOFTCUDA_CALLS="+list)
				m.attach(1)
				clear(m.arena[:regionSize])
				held.hold()
				ticket, err := m.peer(1).Copy(eachPathCopy(dir))
				if err != nil {
					t.Fatal(err)
				}
				devicetest.Until(t, "the copy begins", func() bool {
					return readCalls(t, list)["cuMemcpyBatchAsync"] > 0
				})
				m.engine.Kill()
				held.letGo()
				d := m.done(ticket)
				p := &faultPlan{fixture: m, pattern: pattern(3, regionSize)}
				if dir == cudaipc.Gather {
					p.good(eachPathCopy(dir), &d, m.arena)
				}
				if d.Err == nil {
					t.Error("the end of the copy does not say that its engine died meanwhile")
				}
				if err := m.peer(1).Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
		}
	}
}

// TestCUDAHangs has a call of the driver that does not return. It expects the mover to be killed
// and reaped within its limits, its copies to end with bad blocks, and the next mover to serve.
func TestCUDAHangs(t *testing.T) {
	ownMachine(t)
	names := []string{"cuIpcOpenMemHandle", "cuMemcpyBatchAsync", "cuEventQuery", "cuMemcpyDtoH"}
	if os.Getenv(fullFaults) != "" {
		names = slices.Sorted(maps.Keys(called(t, faultEngine(t))))
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, end := faultRun(t, faultEngine(t), hung(costOf[name]), fmt.Sprintf("SOFTCUDA_HANG=%s:1", name))
			lost := p.mover.Movers()[0].Lost
			switch costOf[name] {
			case "import", "gather", "scatter", "sample", "poll":
				if end.step != costOf[name] || lost[cudaipc.LostCall]+lost[cudaipc.LostCopy] != 1 {
					t.Errorf("%q: %v; losses %v, want one", end.step, end.err, lost)
				}
			}
		})
	}
}

// readCalls counts the calls that a software driver noted in a file.
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
