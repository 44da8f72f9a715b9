package transfer

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	devices "github.com/kvagent/kvagent/cudaipc/node"
	"github.com/kvagent/kvagent/pool"
)

// sampleRig is an engine in a process of its own, with regions 1 and 2 laid out as layout's, and
// its samples' expected results.
type sampleRig struct {
	*rank
	n          *node
	peer       cudaipc.Peer
	space      pool.SpaceID
	mu         sync.Mutex
	mismatches []Mismatch
}

// openSampled makes the device of a node, and an engine that it can import.
type openSampled struct {
	device func(fd int, size int64) (cudaipc.Device, error)
	engine func(devicetest.T, devicetest.Spec) devicetest.Engine
}

func hostEngine(t devicetest.T, s devicetest.Spec) devicetest.Engine {
	return devicetest.HostEngine(t, s, cudaipc.KindFD)
}

// sampledDevices are all devices that this build has without a GPU.
var sampledDevices = map[string]openSampled{
	"host": {engine: hostEngine, device: openHost},
	"process": {engine: func(t devicetest.T, s devicetest.Spec) devicetest.Engine {
		return devicetest.HostEngine(t, s, cudaipc.KindPeer)
	}, device: openHost},
	"mover": {engine: hostEngine, device: func(fd int, size int64) (cudaipc.Device, error) {
		m, err := mover.New(mover.Options{
			Name: "test", Device: cudaipc.HostDevice, ArenaFD: fd, ArenaSize: size,
			Command: devicetest.MoverCommand, Env: devicetest.MoverEnv, Node: -1,
		})
		return devices.Open(devices.Options{Host: m}), err
	}},
}

// patientSamples let no sum be late, however busy the machine is.
func patientSamples() Limits {
	l := DefaultLimits
	l.SampleWait = cudaipc.MaxSampleWait
	return l
}

// sampledRig has blocks 0 to 7 filled with a pattern of the engine's; wrap may put a device before
// the real one.
func (o openSampled) rig(t *testing.T, change func(*Config, *sampleRig)) *sampleRig {
	t.Helper()
	r := &sampleRig{n: newNodeOn(t, 64, o.device)}
	r.rank = &rank{t: t, done: make(chan Completion, 64)}
	r.engine = o.engine(t, devicetest.Spec{Regions: []int64{blocks * 2 * piece, blocks * 2 * piece}, Events: 1,
		Revokes: 8})
	im, err := r.engine.Import()
	if err != nil {
		t.Fatal(err)
	}
	r.peer = devicetest.Import(t, r.n.host, im)
	arena, _ := r.n.pool.Arena()
	cfg := Config{
		Peer: r.peer, Slots: r.n.pool, Spec: spec(1), Held: []Held{{Layout: layout()}}, Lanes: r.n.lanes,
		Limits:   patientSamples(),
		Complete: func(c Completion) { r.done <- c },
		Sampling: Sampling{Every: 1, Arena: arena, Mismatch: func(m Mismatch) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.mismatches = append(r.mismatches, m)
		}},
	}
	for i := range cfg.Held[0].Layout.Groups[0].Segments {
		cfg.Held[0].Layout.Groups[0].Segments[i].Region++ // an engine's are numbered from 1 on
	}
	change(&cfg, r)
	if cfg.Space, err = r.n.pool.OpenSpace(cfg.Spec); err != nil {
		t.Fatal(err)
	}
	r.space = cfg.Space
	if r.worker, err = Start(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.worker.Close)
	for region := range 2 {
		r.do(devicetest.Op{Kind: devicetest.Fill, Region: cudaipc.RegionID(region + 1), Len: 8 * 2 * piece,
			Seed: uint64(region + 1)})
	}
	return r
}

func (r *sampleRig) finish(j Job) Completion {
	r.t.Helper()
	if err := r.worker.Submit(j); err != nil {
		r.t.Fatal(err)
	}
	return <-r.done
}

// block is what the engine has in one block.
func (r *sampleRig) block(b uint32) (data []byte) {
	for region := range 2 {
		data = append(data, r.do(devicetest.Op{Kind: devicetest.Read, Region: cudaipc.RegionID(region + 1),
			Off: int64(b) * 2 * piece, Len: 2 * piece})...)
	}
	return data
}

func (r *sampleRig) stored(from, n int) int {
	return r.n.pool.Prefix(r.space, 0, pool.Chain(chain(from, n), hashLen))
}

// TestSampleCatchesWrongCopies has a device that copies wrongly in every way, and does not report
// it. With each block checked, the wrong one is neither stored nor reported as delivered. Without a
// check it is.
func TestSampleCatchesWrongCopies(t *testing.T) {
	for name, open := range sampledDevices {
		t.Run(name, func(t *testing.T) { catchesWrongCopies(t, open) })
	}
}

func catchesWrongCopies(t *testing.T, open openSampled) {
	for fault := range devicetest.CopiedWays {
		for _, integrity := range []Integrity{Full, Header} {
			for _, every := range []uint32{0, 1} {
				t.Run(fmt.Sprintf("way %d, integrity %d, every %d", fault, integrity, every), func(t *testing.T) {
					catchesSave(t, open, fault, integrity, every)
					catchesLoad(t, open, fault, integrity, every)
				})
			}
		}
	}
}

// miscopying puts a device that goes wrong before the real one. It does so from the first copy on
// that is of kind.
func miscopying(fault devicetest.Miscopied, integrity Integrity, every uint32, kind Kind) func(*Config, *sampleRig) {
	return func(c *Config, r *sampleRig) {
		c.Integrity, c.Sampling.Every = integrity, every
		c.Peer = &wrongWay{Miscopy: devicetest.Miscopy{Peer: r.peer, Arena: c.Sampling.Arena, Fault: fault},
			kind: kind}
	}
}

// wrongWay goes wrong in one direction.
type wrongWay struct {
	devicetest.Miscopy
	kind Kind
}

func (w *wrongWay) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if (c.Dir == cudaipc.Gather) == (w.kind == Save) {
		return w.Miscopy.Copy(c)
	}
	return w.Peer.Copy(c)
}

func catchesSave(t *testing.T, open openSampled, fault devicetest.Miscopied, integrity Integrity, every uint32) {
	r := open.rig(t, miscopying(fault, integrity, every, Save))
	c := r.finish(save(1, section(0, 4, 0)))
	if every == 0 {
		if c.Status[3] != pool.OK || r.stored(0, 4) != 4 {
			t.Errorf("unchecked, the wrong block has status %d: this test's device does not fail as a GPU does",
				c.Status[3])
		}
		return
	}
	if want := []pool.Status{pool.OK, pool.OK, pool.OK, Failed}; !slices.Equal(c.Status, want) || r.stored(0,
		4) != 3 {
		t.Fatalf("save: statuses %v, %d blocks stored; want %v: a wrong copy was stored", c.Status, r.stored(0, 4),
			want)
	}
	r.told(c, 1, Mismatch{Job: 1, Kind: Save, Hash: chain(3, 1), Block: 3, Status: Failed})
}

func catchesLoad(t *testing.T, open openSampled, fault devicetest.Miscopied, integrity Integrity, every uint32) {
	r := open.rig(t, miscopying(fault, integrity, every, Load))
	if c := r.finish(save(1, section(0, 4, 0))); every == 1 && c.Sample != (SampleCounts{Matched: 4}) {
		t.Fatalf("save: %+v, want 4 that match", c.Sample)
	}
	c := r.finish(load(2, section(0, 4, 10)))
	wrong := !bytes.Equal(r.block(13), r.block(3))
	if every == 0 {
		if caught := c.Status[3] != pool.OK; !wrong || caught != (integrity == Full &&
			fault == devicetest.CopiedMisplaced) {
			t.Errorf("unchecked, the wrong block (%v) has status %d: this test's device does not fail as a GPU does",
				wrong, c.Status[3])
		}
		return
	}
	bad := 1
	if fault == devicetest.CopiedOtherBlock {
		bad = 2 // the block before has these bytes now
	}
	status, left := Failed, 4
	if integrity == Header || fault == devicetest.CopiedMisplaced {
		status, left = pool.Corrupt, 4-bad
	}
	want := []pool.Status{pool.OK, pool.OK, pool.OK, status}
	for i := range bad {
		want[3-i] = status
	}
	if !slices.Equal(c.Status, want) || r.stored(0, 4) != left {
		t.Fatalf("load: statuses %v, %d blocks stored; want %v, %d: a wrong copy was said to be delivered",
			c.Status, r.stored(0, 4), want, left)
	}
	if integrity == Header || fault != devicetest.CopiedMisplaced { // else the copy's own sums have it
		r.told(c, bad, Mismatch{Job: 2, Kind: Load, Hash: chain(3, 1), Block: 13, Status: status})
	}
	for i := range uint32(4 - bad) {
		if !bytes.Equal(r.block(10+i), r.block(i)) {
			t.Errorf("block %d is said to have been delivered, and has other bytes", i)
		}
	}
}

// told checks the number of mismatches of four blocks, each of two different sums, and the last
// one.
func (r *sampleRig) told(c Completion, bad int, want Mismatch) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.Sample != (SampleCounts{Matched: uint64(4 - bad), Mismatched: uint64(bad)}) || len(r.mismatches) != bad {
		r.t.Fatalf("%+v, %d told; want %d that do not match, and those told", c.Sample, len(r.mismatches), bad)
	}
	got := r.mismatches[bad-1]
	if got.Engine == got.Slot || got.Job != want.Job || got.Kind != want.Kind || !bytes.Equal(got.Hash,
		want.Hash) || got.Block != want.Block || got.Status != want.Status {
		r.t.Errorf("told %+v, want %+v with two sums", got, want)
	}
}

// TestSampleOfADamagedSlot expects a damaged slot, which its own checksum proves, to lose its
// entry.
func TestSampleOfADamagedSlot(t *testing.T) {
	flip := &flipping{}
	r := sampledDevices["host"].rig(t, func(c *Config, r *sampleRig) {
		flip.Peer, flip.arena, c.Peer = r.peer, c.Sampling.Arena, flip
	})
	r.finish(save(1, section(0, 1, 0)))
	flip.on = true
	c := r.finish(load(2, section(0, 1, 10)))
	if c.Status[0] != pool.Corrupt || r.stored(0, 1) != 0 {
		t.Errorf("status %d, %d blocks stored; want corrupt, and the entry dropped", c.Status[0], r.stored(0, 1))
	}
}

// flipping is a peer whose arena changes between the sum that a load makes of it and the bytes
// that it copies.
type flipping struct {
	cudaipc.Peer
	arena []byte
	on    bool
	sums  []uint32
}

func (f *flipping) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if f.on {
		f.sums = nil
		run := 0
		for _, b := range c.Blocks {
			sum := b.Seed
			for range b.Runs {
				sum = pool.Sum(sum, f.arena[c.Runs[run].ArenaOff:c.Runs[run].ArenaOff+int64(c.Runs[run].Len)])
				run++
			}
			f.sums = append(f.sums, sum)
		}
		f.arena[c.Runs[0].ArenaOff+5] ^= 1
	}
	ticket, err := f.Peer.Copy(c)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		d, ok, err := ticket(timeout)
		if ok && f.sums != nil {
			d.Sums, f.sums = f.sums, nil
		}
		return d, ok, err
	}, err
}

// heldSums is a peer whose sums stand still between submission and start, until open is called.
type heldSums struct {
	*gate  // of which only the sums are held
	copies chan struct{}
}

func newHeldSums() *heldSums {
	return &heldSums{gate: newGate(), copies: make(chan struct{}, 1024)}
}

// close has the sums stand still again that are asked for from now on.
func (h *heldSums) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opened, h.opening = false, make(chan struct{})
}

func (h *heldSums) isOpen() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.opened
}

func (h *heldSums) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	h.copies <- struct{}{}
	return h.Peer.Copy(c)
}

func (h *heldSums) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	if h.isOpen() {
		return h.Peer.Sum(s)
	}
	h.submitted <- struct{}{}
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		if !h.isOpen() {
			h.stands(timeout)
			return cudaipc.Done{}, false, nil
		}
		ticket, err := h.Peer.Sum(s)
		for err == nil {
			var d cudaipc.Done
			var ok bool
			if d, ok, err = ticket(timeout); ok {
				return d, ok, err
			}
		}
		return cudaipc.Done{}, false, err
	}, nil
}

// sampleStation is a station each of whose blocks is checked, on a device whose sums stand still.
func sampleStation(t *testing.T, n *node, change func(*Config)) (*station, *heldSums) {
	t.Helper()
	held := newHeldSums()
	s := n.join(t, func(c *Config) {
		arena, _ := n.pool.Arena()
		held.Peer, c.Peer = c.Peer, held
		c.Limits, c.Sampling = patientSamples(), Sampling{Every: 1, Arena: arena}
		if change != nil {
			change(c)
		}
	})
	t.Cleanup(held.open)
	return s, held
}

// TestCancelWaitsForSums cancels a job while the engine's memory is being summed, and expects the
// acknowledgement after that has ended.
func TestCancelWaitsForSums(t *testing.T) {
	for _, kind := range []Kind{Save, Load} {
		n := newNode(t, 64)
		n.join(t, nil).fill(0, 4)
		s, held := sampleStation(t, n, nil)
		job := save(1, section(100, 4, 0))
		if kind == Load {
			job = load(1, section(0, 4, 0))
		}
		s.submit(job)
		held.during(s, "cancel is no fence for a sum", func() {
			if !s.worker.Cancel(1) {
				t.Fatal("the job is not known")
			}
		})
		held.open()
		s.completion()
	}
}

// TestDoneWaitsForSums expects a job that is not cancelled, and the worker's end, to wait for the
// sums too.
func TestDoneWaitsForSums(t *testing.T) {
	for _, kind := range []Kind{Save, Load} {
		n := newNode(t, 64)
		n.join(t, nil).fill(0, 4)
		s, held := sampleStation(t, n, nil)
		job := save(1, section(100, 4, 0))
		if kind == Load {
			job = load(1, section(0, 4, 0))
		}
		s.submit(job)
		held.during(s, "completion before the sum has ended", func() {})
		held.open()
		if c := s.ends(1, pool.OK); c.Sample != (SampleCounts{Matched: 4}) {
			t.Errorf("kind %d: %+v, want 4 that match", kind, c.Sample)
		}
	}
}

// TestSampleOfARevokedSave revokes a save while its block is summed, and overwrites it. That is no
// mismatch.
func TestSampleOfARevokedSave(t *testing.T) {
	n := newNode(t, 64)
	s, held := sampleStation(t, n, func(c *Config) {
		c.Sampling.Mismatch = func(m Mismatch) { t.Errorf("told of a mismatch of blocks that were dropped: %+v", m) }
	})
	s.write(3, 1)
	job := save(1, section(0, 1, 3))
	job.Revoke = 7
	s.submit(job)
	held.during(s, "a revoked save", func() {
		s.engine.Revoke(7)
		s.write(3, 2)
	})
	held.open()
	if c := s.ends(1, Revoked); c.Sample != (SampleCounts{Unverified: 1}) || s.stored(0, 1) != 0 {
		t.Errorf("%+v, %d blocks stored; want one that was not verified, and none", c.Sample, s.stored(0, 1))
	}
}

// TestCopiesGoOnBesideSums expects the device to have the next copy while the first batch is
// summed.
func TestCopiesGoOnBesideSums(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(3, DefaultLimits.SaveAge, nil)
	s, held := sampleStation(t, n, func(c *Config) { c.Limits.BatchBytes, c.Limits.Batches = blockSize, 2 })
	for b := range uint32(10) {
		s.write(b, 1000+uint64(b))
	}
	s.submit(save(1, section(0, 10, 0)))
	for i := range 2 { // one batch is summed, one copied
		select {
		case <-held.copies:
		case <-time.After(patience):
			t.Fatalf("%d copies have begun while the first sum is under way, want 2: the device waits for it", i)
		}
	}
	held.during(s, "while sums stand still", func() {})
	held.open()
	s.ends(1, pool.OK)
	s.finish(load(2, section(0, 10, 20)), pool.OK)
	for b := range uint32(10) {
		s.expect(20+b, 1000+uint64(b), "a load beside sums")
	}
	if free := n.lanes.mu.free; free != 3 {
		t.Errorf("%d lanes are free at the end, want 3", free)
	}
}

// TestSamplesThatAreNotMade has no time left for the samples, or a device without them, and expects
// the blocks to be treated as unchecked, and counted.
func TestSamplesThatAreNotMade(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"late":    func(c *Config) { c.Limits.SampleWait = 1 },
		"refused": func(c *Config) { c.Peer = &noSums{c.Peer} },
	} {
		s := newNode(t, 64).join(t, func(c *Config) {
			arena, _ := c.Slots.(interface{ Arena() ([]byte, int) }).Arena()
			c.Limits, c.Sampling = patientSamples(), Sampling{Every: 1, Arena: arena}
			change(c)
		})
		for _, job := range []Job{save(1, section(0, 4, 0)), load(2, section(0, 4, 10))} {
			if c := s.finish(job, pool.OK); c.Sample != (SampleCounts{Unverified: 4}) {
				t.Errorf("%s, job %d: %+v, want 4 that were not verified", name, job.ID, c.Sample)
			}
		}
	}
}

// TestEngineDiesWhileSummed kills an engine whose memory is being summed, so that its contents are
// unknown. It expects the job to end, and its blocks to be counted.
func TestEngineDiesWhileSummed(t *testing.T) {
	for _, name := range []string{"host", "process"} {
		for _, kind := range []Kind{Save, Load} {
			var held *heldSums
			r := sampledDevices[name].rig(t, func(c *Config, r *sampleRig) {
				held = newHeldSums()
				held.Peer, c.Peer = c.Peer, held
			})
			t.Cleanup(held.open)
			job := save(1, section(0, 4, 0))
			if kind == Load {
				held.open() // the blocks are saved first
				r.finish(job)
				held.close()
				job = load(2, section(0, 4, 10))
			}
			if err := r.worker.Submit(job); err != nil {
				t.Fatal(err)
			}
			<-held.submitted
			r.engine.Kill()
			held.open()
			c := <-r.done
			if n := c.Sample; n.Mismatched != 0 || n.Matched+n.Unverified != 4 || name == "process" &&
				n.Unverified != 4 {
				t.Errorf("%s, kind %d: %+v; want 4 that match, or were not verified because the process is gone",
					name, kind, n)
			}
		}
	}
}

type noSums struct{ cudaipc.Peer }

func (*noSums) Sum(*cudaipc.Sample) (cudaipc.Ticket, error) { return nil, cudaipc.ErrPeer }

// TestPickerTakesOneOfEach expects one block of each row, at every place of it, whatever the jobs'
// sizes are, and the same for one seed.
func TestPickerTakesOneOfEach(t *testing.T) {
	const every, rows = 10, 3000
	picks := func(seed uint64, kind Kind) (list []int) {
		p := newPicker(&Sampling{Every: every, Seed: seed}, kind)
		for i := range every * rows {
			if p.next() {
				list = append(list, i)
			}
		}
		return list
	}
	list := picks(7, Save)
	var at [every]int
	for row, i := range list {
		if i/every != row {
			t.Fatalf("pick %d is block %d: not one of each %d", row, i, every)
		}
		at[i%every]++
	}
	for place, n := range at {
		if n < rows/every*3/4 || n > rows/every*5/4 {
			t.Errorf("place %d of a row was chosen %d times of %d: position chooses", place, n, rows)
		}
	}
	if len(list) != rows || !slices.Equal(list, picks(7, Save)) || slices.Equal(list, picks(8, Save)) ||
		slices.Equal(list, picks(7, Load)) {
		t.Errorf("%d picks of %d rows; one seed and direction must give the same ones, others must not", len(list),
			rows)
	}
	all, none := newPicker(&Sampling{Every: 1}, Save), newPicker(&Sampling{}, Save)
	for range 100 {
		if !all.next() || none.next() {
			t.Fatal("1 is all blocks, 0 none")
		}
	}
}

// TestSampleAcrossSmallJobs expects jobs that are shorter than a row to be checked as often as long
// ones.
func TestSampleAcrossSmallJobs(t *testing.T) {
	s := newNode(t, 64).join(t, func(c *Config) {
		arena, _ := c.Slots.(interface{ Arena() ([]byte, int) }).Arena()
		c.Limits, c.Sampling = patientSamples(), Sampling{Every: 5, Arena: arena}
	})
	var total SampleCounts
	for i := range 20 {
		total.Matched += s.finish(save(uint64(i+1), section(2*i, 2, 0)), pool.OK).Sample.Matched
	}
	if total.Matched != 8 {
		t.Errorf("%d of 40 blocks were checked, want 8", total.Matched)
	}
}

// TestMismatchWidensTheSample expects the rest of a batch with one wrong block to be checked, and
// the batches after it.
func TestMismatchWidensTheSample(t *testing.T) {
	r := sampledDevices["host"].rig(t, miscopying(devicetest.CopiedNotAll, Full, 8, Save))
	p := r.worker.mu.threads[Save].picker
	p.left, p.at = 8, 0 // the last of the next eight
	if c := r.finish(save(1, section(0, 8, 0))); c.Sample != (SampleCounts{Matched: 7, Mismatched: 1}) {
		t.Errorf("%+v, want the batch's other 7 blocks checked too", c.Sample)
	}
	if c := r.finish(save(2, section(20, 4, 0))); c.Sample != (SampleCounts{Matched: 3, Mismatched: 1}) {
		t.Errorf("%+v, want all 4 blocks behind it checked", c.Sample)
	}
}
