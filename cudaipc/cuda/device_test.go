//go:build cuda

package cuda_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/engine"
)

// bench is a CUDA device with an engine on the same GPU, imported.
type bench struct {
	t      *testing.T
	device *cuda.Device
	arena  []byte
	engine devicetest.Engine
	peer   cudaipc.Peer
}

func newBench(t *testing.T, s devicetest.Spec, change func(*cuda.Options)) *bench {
	t.Helper()
	f := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, change)
	b := &bench{t: t, device: f.Device.(*cuda.Device), arena: f.Arena, engine: f.Engine(t, s)}
	b.peer = devicetest.Import(t, b.device, b.describe())
	return b
}

func (b *bench) describe() cudaipc.Import {
	b.t.Helper()
	im, err := b.engine.Import()
	if err != nil {
		b.t.Fatal(err)
	}
	return im
}

func (b *bench) do(ops ...devicetest.Op) []byte {
	b.t.Helper()
	var data []byte
	for _, op := range ops {
		var err error
		if data, err = b.engine.Do(op); err != nil {
			b.t.Fatalf("engine, operation %d: %v", op.Kind, err)
		}
	}
	return data
}

func (b *bench) copy(dir cudaipc.Direction, runs ...cudaipc.Run) cudaipc.Done {
	b.t.Helper()
	ticket, err := b.peer.Copy(&cudaipc.Copy{
		Dir:    dir,
		Runs:   runs,
		Blocks: []cudaipc.Block{{Runs: uint32(len(runs))}},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	d, ok, err := ticket(30 * time.Second)
	if err != nil || !ok || d.Err != nil {
		b.t.Fatalf("copy: %v, %v, %v", ok, err, d.Err)
	}
	return d
}

func (b *bench) poll(w cudaipc.Wait) cudaipc.State {
	b.t.Helper()
	w.Revoke = cudaipc.None
	s, err := b.peer.Poll(w)
	if err != nil {
		b.t.Fatalf("Poll: %v", err)
	}
	return s
}

func pattern(seed uint64, n int) []byte {
	p := make([]byte, n)
	devicetest.Pattern(p, seed, 0)
	return p
}

// TestCUDARegionsBeginInTheirAllocation has several tensors in one allocation, none of them at its
// start.
func TestCUDARegionsBeginInTheirAllocation(t *testing.T) {
	const n = 64 << 10
	b := newBench(t, devicetest.Spec{Regions: []int64{n, n + 100, n}}, nil)
	for r := range cudaipc.RegionID(3) {
		b.do(devicetest.Op{Kind: devicetest.Fill, Region: r + 1, Len: n, Seed: uint64(r)})
	}
	for r := range cudaipc.RegionID(3) {
		b.copy(cudaipc.Gather, cudaipc.Run{Region: r + 1, Len: n})
		if !bytes.Equal(b.arena[:n], pattern(uint64(r), n)) {
			t.Fatalf("region %d: other bytes than its own", r+1)
		}
	}
	if got := b.device.Info().Imports; got != 1 {
		t.Errorf("three regions of one allocation: %d imports, want 1", got)
	}
}

// TestCUDACompletionIsTheEnd looks at the last bytes of a long copy the moment that it is said to
// be done.
func TestCUDACompletionIsTheEnd(t *testing.T) {
	const n = 48 << 20
	b := newBench(t, devicetest.Spec{Regions: []int64{n}}, nil)
	devicetest.Pinned(t, b.device)
	for seed := range uint64(3) {
		b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Off: n - 4096, Len: 4096, Seed: seed})
		b.copy(cudaipc.Gather, cudaipc.Run{Region: 1, Len: n})
		want := make([]byte, 4096)
		devicetest.Pattern(want, seed, n-4096)
		if !bytes.Equal(b.arena[n-4096:n], want) {
			t.Fatalf("round %d: done before the copy had ended", seed)
		}
	}
}

// TestCUDAEventIsAsked expects that an event after a running kernel has not fired.
func TestCUDAEventIsAsked(t *testing.T) {
	b := newBench(t, devicetest.Spec{Regions: []int64{4096}, Events: 2}, nil)
	b.do(devicetest.Op{Kind: devicetest.Hold}, devicetest.Op{Kind: devicetest.Record, Index: 1})
	for range 20 {
		if b.poll(cudaipc.Wait{Event: 1}).Fired {
			t.Fatal("fired while the kernel runs")
		}
	}
	b.do(devicetest.Op{Kind: devicetest.LetGo}, devicetest.Op{Kind: devicetest.Synchronize})
	if !b.poll(cudaipc.Wait{Event: 1}).Fired {
		t.Fatal("not fired when the stream was empty")
	}
}

// TestCUDAStepWordIsRead expects that an event that has fired is no proof of a step whose word is
// not written, and that an event whose step is not reached is not asked.
func TestCUDAStepWordIsRead(t *testing.T) {
	b := newBench(t, devicetest.Spec{Regions: []int64{4096}, Events: 1}, nil)
	b.do(devicetest.Op{
		Kind: devicetest.SetStep,
		Step: 1<<40 + 7,
	}, devicetest.Op{Kind: devicetest.Record}, devicetest.Op{Kind: devicetest.Synchronize})
	if s := b.poll(cudaipc.Wait{}); s.Step != 1<<40+7 || !s.Fired {
		t.Fatalf("step %d, want %d; fired %v", s.Step, uint64(1<<40+7), s.Fired)
	}
	if s := b.poll(cudaipc.Wait{Step: 1<<40 + 8}); s.Fired {
		t.Fatal("fired for a step that the word has not reached")
	}
}

// TestCUDADeathLeavesNothingOpen kills an engine and expects its open regions and events to be
// closed.
func TestCUDADeathLeavesNothingOpen(t *testing.T) {
	b := newBench(t, devicetest.Spec{Regions: []int64{1 << 20}, Events: 3}, nil)
	if got := b.device.Info().Imports; got != 4 {
		t.Fatalf("%d imports, want one allocation and three events", got)
	}
	b.engine.Kill()
	if err := b.peer.Close(); err != nil {
		t.Fatal(err)
	}
	if got := b.device.Info().Imports; got != 0 {
		t.Fatalf("handle leaked: %d imports are open after the engine's death", got)
	}
}

func TestCUDAImportSaysWhatToSet(t *testing.T) {
	b := newBench(t, devicetest.Spec{Regions: []int64{1 << 20}, Events: 1}, nil)
	before := b.device.Info().Imports
	for _, test := range []struct {
		name, says string
		is         error
		change     func(*cudaipc.Import)
	}{
		{"another GPU", "matched by UUID", cudaipc.ErrNoCUDA, func(im *cudaipc.Import) { im.GPU[3]++ }},
		{"no GPU", "matched by UUID", cudaipc.ErrNoCUDA, func(im *cudaipc.Import) { im.GPU = cudaipc.UUID{} }},
		{
			"a short handle", "63 bytes", cudaipc.ErrRange,
			func(im *cudaipc.Import) { im.Regions[1].Handle = im.Regions[1].Handle[:63] },
		},
		{
			"a handle of nothing", "expandable_segments", cudaipc.ErrKind,
			func(im *cudaipc.Import) { im.Regions[1].Handle = make([]byte, 64) },
		},
		{
			"beyond the allocation", "of an allocation of", cudaipc.ErrRange,
			func(im *cudaipc.Import) { im.Regions[1].Addr = 1 << 40 },
		},
		{
			"longer than the allocation", "of an allocation of", cudaipc.ErrRange,
			func(im *cudaipc.Import) { im.Regions[1].Size = 1 << 30 },
		},
		{
			"an offset that overflows", "of an allocation of", cudaipc.ErrRange,
			func(im *cudaipc.Import) { im.Regions[1].Addr = ^uint64(0) },
		},
		{
			"host memory as KV", "for the words alone", cudaipc.ErrKind,
			func(im *cudaipc.Import) { im.Regions[1].Kind, im.Regions[1].FD = cudaipc.KindFD, -1 },
		},
	} {
		im := b.describe()
		im.Regions[1].Handle = bytes.Clone(im.Regions[1].Handle)
		test.change(&im)
		_, err := b.device.Import(im)
		if !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %v and %q", test.name, err, test.is, test.says)
		}
	}
	if got := b.device.Info().Imports; got != before {
		t.Errorf("refused imports left %d open", got-before)
	}
}

// A mover answers questions about its device until it ends: a question
// beside the end finds no opener, and does not wait for one.
func TestCUDAAskedWhileItCloses(t *testing.T) {
	const askers = 4
	var asking, asked sync.WaitGroup
	closed := make(chan struct{})
	t.Cleanup(func() { // after the fixture's, which closes the device
		close(closed)
		asked.Wait()
	})
	b := newBench(t, devicetest.Spec{Regions: []int64{1 << 20}}, nil)
	asking.Add(askers)
	for range askers {
		asked.Go(func() {
			b.device.Info()
			asking.Done()
			for over := false; !over; {
				select {
				case <-closed:
					over = true // once more, after the end
				default:
				}
				b.device.Info()
			}
		})
	}
	asking.Wait()
}

// TestCUDARefusalToPin expects memory that the driver does not pin to be copied all the same, and
// Info to report that.
func TestCUDARefusalToPin(t *testing.T) {
	const n = 3 << 20
	first := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, nil)
	devicetest.Pinned(t, first.Device.(*cuda.Device))
	b := newBench(t, devicetest.Spec{Regions: []int64{n}},
		func(o *cuda.Options) { o.Arena, o.Ring = first.Arena, 1<<20 })
	b.arena = first.Arena
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: n, Seed: 4})
	b.copy(cudaipc.Gather, cudaipc.Run{Region: 1, Len: n})
	if !bytes.Equal(b.arena[:n], pattern(4, n)) {
		t.Error("bytes through the ring are wrong")
	}
	devicetest.Pinned(t, b.device)
	info := b.device.Info()
	if info.PinError == "" || info.Refused != info.Arena || info.Pinned != 0 || info.RingBytes < n {
		t.Errorf("an arena that is pinned already: %+v, want it refused and said", info)
	}
}

// TestCUDABothDirections has copies of both in flight at once.
func TestCUDABothDirections(t *testing.T) {
	const n = 8 << 20
	b := newBench(t, devicetest.Spec{Regions: []int64{n, n}}, nil)
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: n, Seed: 1})
	copy(b.arena[n:], pattern(2, n))
	var tickets []cudaipc.Ticket
	for i := range 20 {
		dir := cudaipc.Direction(i % 2)
		ticket, err := b.peer.Copy(&cudaipc.Copy{Dir: dir, Sum: true, Blocks: []cudaipc.Block{{Runs: 1}},
			Runs: []cudaipc.Run{{Region: 1 + cudaipc.RegionID(dir), ArenaOff: int64(dir) * n, Len: n}}})
		if err != nil {
			t.Fatal(err)
		}
		tickets = append(tickets, ticket)
	}
	sums := map[uint32]int{}
	for _, ticket := range tickets {
		d, ok, err := ticket(30 * time.Second)
		if !ok || err != nil || d.Err != nil {
			t.Fatal(ok, err, d.Err)
		}
		sums[d.Sums[0]]++
	}
	if len(sums) != 2 || !bytes.Equal(b.arena[:n], pattern(1, n)) || !bytes.Equal(b.do(devicetest.Op{
		Kind:   devicetest.Read,
		Region: 2,
		Len:    n,
	}), pattern(2, n)) {
		t.Fatalf("bytes or sums (%v) are wrong", sums)
	}
}

func TestCUDAOptionsAreChecked(t *testing.T) {
	_, err := cuda.Open(cuda.Options{GPU: cudaipc.UUID{1}})
	if err == nil || !strings.Contains(err.Error(), "not among") {
		t.Errorf("a GPU that is not there: %v", err)
	}
	_, err = engine.NewCUDA(cudaipc.UUID{1}, 0, 0)
	if !errors.Is(err, cudaipc.ErrNoCUDA) {
		t.Errorf("an engine on no GPU: %v", err)
	}
	if _, err := engine.NewCUDA(cudaipc.UUID{}, cuda.MaxEvents+1, 0); err == nil {
		t.Error("an engine with too many events: no error")
	}
}

// TestCUDAWritesAreThere expects a wait after each write from unpinned memory (what an engine's
// stage is too small for) and each clearing, because a driver may still be working on it when the
// call returns. A software driver is not, so the test looks at the calls.
func TestCUDAWritesAreThere(t *testing.T) {
	engine, err := engine.NewCUDA(cudaipc.UUID{}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	list := filepath.Join(t.TempDir(), "calls")
	t.Setenv("SOFTCUDA_CALLS", list) // nothing is in flight: C's environment is not for two threads
	m, err := engine.Alloc(1, 1<<17)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.WriteAt(make([]byte, 1<<17), 0); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	calls := strings.Fields(strings.ReplaceAll(string(text), "_v2", ""))
	for _, name := range []string{"cuMemsetD8", "cuMemcpyHtoD"} {
		if i := slices.Index(calls, name); i < 0 || i+1 == len(calls) || calls[i+1] != "cuStreamSynchronize" {
			t.Errorf("%s is not waited for: %v", name, calls)
		}
	}
}
