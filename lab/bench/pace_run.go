package bench

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

const (
	paceSegment = 32 << 10 // bytes of a block in one layer
	paceReports = 8        // steps that are reported together
	paceJobs    = 4        // saves that wait, so that there is always a next one
	paceBlocks  = 32       // blocks of a save
	paceBatch   = 4        // requests of each step
)

// measurePace measures in turns, so that what else the machine does meets all phases alike.
func measurePace(s *paceSettings) (r *paceReport, err error) {
	// The loop's threads are an engine's: the kernel decides who runs, not Go's scheduler.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + s.threads))
	loop, err := newComputeLoop(s.threads, s.weights, s.cpuTime)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, loop.close()) }()
	free, err := newFlood(s.memory, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free.close()) }()
	pacer := pace.New(pace.Auto, nil)
	paced, err := newFlood(s.memory, pacer)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, paced.close()) }()
	engine := pacer.Engine()
	loop.run(s.steps, engine) // steps alone, which an engine has before its first saves
	if s.settle > 0 {
		if _, _, err := paced.beside(func() []float64 { return loop.run(s.settle, engine) }); err != nil {
			return nil, err
		}
	}
	var m paceRounds
	for range s.rounds {
		if err := m.round(s, loop, free, paced, engine); err != nil {
			return nil, err
		}
	}
	r = m.report()
	r.Threads, r.WeightsBytes, r.Steps, r.Rounds = s.threads, s.weights, s.steps, s.rounds
	r.CPUTime = s.cpuTime
	n := pacer.Report().Counts
	r.Cuts, r.Raises, r.Holds = n.Cuts, n.Raises, n.Holds
	return r, nil
}

// paceRounds has a value of each round.
type paceRounds struct {
	alone50, alone99, again99, free50, free99, paced50, paced99, freeRate, pacedRate []float64
}

func (m *paceRounds) round(s *paceSettings, loop *computeLoop, free, paced *flood, engine *pace.Engine) error {
	alone := loop.run(s.steps, nil)
	besideFree, freeRate, err := free.beside(func() []float64 { return loop.run(s.steps, nil) })
	if err != nil {
		return err
	}
	again := loop.run(s.steps, nil)
	besidePaced, pacedRate, err := paced.beside(func() []float64 { return loop.run(s.steps, engine) })
	if err != nil {
		return err
	}
	for _, one := range []struct {
		took     []float64
		p50, p99 *[]float64
	}{
		{alone, &m.alone50, &m.alone99}, {again, nil, &m.again99}, {besideFree, &m.free50, &m.free99},
		{besidePaced, &m.paced50, &m.paced99},
	} {
		slices.Sort(one.took)
		if one.p50 != nil {
			*one.p50 = append(*one.p50, one.took[len(one.took)/2])
		}
		*one.p99 = append(*one.p99, one.took[len(one.took)*99/100])
	}
	m.freeRate, m.pacedRate = append(m.freeRate, freeRate), append(m.pacedRate, pacedRate)
	return nil
}

func (m *paceRounds) report() *paceReport {
	return &paceReport{
		AloneP50US: rounded(middle(m.alone50)), AloneP99US: rounded(middle(m.alone99)),
		Noise:   ratioOf(m.again99, m.alone99),
		FreeP50: ratioOf(m.free50, m.alone50), FreeP99: ratioOf(m.free99, m.alone99),
		PacedP50: ratioOf(m.paced50, m.alone50), PacedP99: ratioOf(m.paced99, m.alone99),
		FreeGBps: rounded(middle(m.freeRate)), PacedGBps: rounded(middle(m.pacedRate)),
		Share: ratioOf(m.pacedRate, m.freeRate),
	}
}

// flood is saves without an end.
type flood struct{ *transferBench }

func newFlood(memory int64, pacer *pace.Pacer) (*flood, error) {
	b, err := newTransferBench(memory)
	if err != nil {
		return nil, err
	}
	b.pacer = pacer
	if err := b.start(paceSegment); err != nil {
		return nil, errors.Join(err, b.close())
	}
	f := &flood{b}
	_, err = f.move(b.blocks, true, false) // every page is there from now on
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

func (f *flood) close() error {
	f.worker.Close()
	return f.transferBench.close()
}

// beside saves while something runs, and returns its result and 10^9 bytes of saves per second. It
// runs again, with more results, until a save has ended beside it.
func (f *flood) beside(run func() []float64) (took []float64, rate float64, err error) {
	var over, failed atomic.Bool
	var moved atomic.Int64
	var saving sync.WaitGroup
	saving.Go(func() {
		if err = f.save(&over, &moved); err != nil {
			failed.Store(true)
		}
	})
	begin := time.Now()
	for took = run(); moved.Load() == 0 && !failed.Load(); {
		took = append(took, run()...)
	}
	rate = float64(moved.Load()) / time.Since(begin).Seconds() / 1e9
	over.Store(true)
	saving.Wait()
	return took, rate, err
}

// save saves until over, and counts the bytes.
func (f *flood) save(over *atomic.Bool, moved *atomic.Int64) error {
	waiting := 0
	for !over.Load() || waiting > 0 {
		for waiting < paceJobs && !over.Load() {
			f.chains++
			for _, job := range f.chain(transfer.Save, f.chains, paceBlocks) {
				if err := f.worker.Submit(job); err != nil {
					return err
				}
				waiting++
			}
		}
		if waiting > 0 {
			moved.Add((<-f.done).Bytes)
			waiting--
		}
	}
	return nil
}

// computeLoop reads its weights again and again, with threads of its own.
type computeLoop struct {
	weights []byte
	cpuTime bool            // a step's time is the processor time of its slowest thread
	begin   []chan struct{} // of each thread
	done    chan share
	sum     uint64 // so that reading is not left out
}

// share is what a thread has done of a step.
type share struct {
	sum uint64
	cpu time.Duration
}

func newComputeLoop(threads int, bytes int64, cpuTime bool) (*computeLoop, error) {
	mem, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, err
	}
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	l := &computeLoop{weights: mem, cpuTime: cpuTime, done: make(chan share)}
	words := unsafe.Slice((*uint64)(unsafe.Pointer(&mem[0])), len(mem)/8)
	for i := range threads {
		begin, own := make(chan struct{}), words[i*len(words)/threads:(i+1)*len(words)/threads]
		l.begin = append(l.begin, begin)
		go func() {
			runtime.LockOSThread()
			for range begin {
				before := threadTime()
				sum := sumOf(own)
				l.done <- share{sum, threadTime() - before}
			}
			l.done <- share{}
		}()
	}
	return l, nil
}

func (l *computeLoop) close() error {
	for _, begin := range l.begin {
		close(begin)
		<-l.done
	}
	return unix.Munmap(l.weights)
}

// threadTime returns the processor time of this thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every Linux has this clock
	}
	return time.Duration(t.Nano())
}

// sumOf reads all words.
func sumOf(words []uint64) (sum uint64) {
	var a, b, c, d uint64
	for ; len(words) >= 8; words = words[8:] {
		a += words[0] + words[1]
		b += words[2] + words[3]
		c += words[4] + words[5]
		d += words[6] + words[7]
	}
	return a + b + c + d
}

// run does steps, reports them if there is an engine to report for, and returns their times in us.
func (l *computeLoop) run(steps int, engine *pace.Engine) (took []float64) {
	var ended []pace.Step
	for range steps {
		begin := time.Now()
		for _, thread := range l.begin {
			thread <- struct{}{}
		}
		var slowest time.Duration
		for range l.begin {
			one := <-l.done
			l.sum, slowest = l.sum+one.sum, max(slowest, one.cpu)
		}
		end := time.Now()
		if l.cpuTime {
			begin = end.Add(-slowest)
		}
		took = append(took, float64(end.Sub(begin))/float64(time.Microsecond))
		if ended = append(ended, pace.Step{Begin: begin, End: end, Requests: paceBatch}); len(ended) == paceReports {
			if engine != nil {
				engine.Steps(ended)
			}
			ended = ended[:0]
		}
	}
	return took
}
