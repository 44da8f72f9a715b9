package mover

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// gpuProbe is a process that a mover starts once, before it opens its GPU, and ends after that.
// It measures what the mover cannot: the copy paths, without engines' copies, where a hanging
// driver call costs only the probe; and how much GPU memory the mover's own opening takes.
// Without its answer the device opens all the same, and Facts say why.
//
//	mover                              probe (the same binary, the same command)
//	order: GPU, tables  ────────────▶  opens the GPU; measures, if it has no table
//	                    ◀────────────  facts, free bytes
//	opens the GPU
//	order: again        ────────────▶
//	                    ◀────────────  free bytes
//	closes its end      ────────────▶  ends
type gpuProbe struct {
	cmd     *exec.Cmd
	conn    net.Conn
	answers *json.Decoder
	reaped  chan struct{} // closed when the process is reaped; nil: it was not started
	before  int64         // bytes of the GPU that were free before the mover opened it
	facts   cudaipc.GPUFacts
}

// probeEnd is how long an opening that failed beside a probe waits for the probe's end, which
// frees its part of the GPU's memory.
const probeEnd = 5 * time.Second

// calibrateWithin is the time for cuda.Device.Calibrate; tests change it.
var calibrateWithin = cuda.CalibrateWithin

// probeOrder is a line to a probe. The first one names the GPU.
type probeOrder struct {
	GPU    cudaipc.UUID
	Tables []cudaipc.CopyTable
}

// probeAnswer is the probe's line back.
type probeAnswer struct {
	Free  int64 // bytes of the GPU, now
	Facts cudaipc.GPUFacts
}

// startProbe starts a probe and lets it measure. startProbe and measureContext are called on one
// locked thread: the kernel kills the probe when that thread ends. If it fails, Facts.Problem has
// the error, and nothing is left to end.
func startProbe(s *Setup) *gpuProbe {
	p := &gpuProbe{}
	err := p.start()
	if err == nil {
		err = p.begin(s)
	}
	if err != nil {
		p.facts = cudaipc.GPUFacts{Problem: fmt.Sprintf("nothing was measured: %v", err)}
	}
	return p
}

func (p *gpuProbe) start() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "probe"), os.NewFile(uintptr(pair[1]), "probe")
	defer theirs.Close()
	defer ours.Close() // FileConn has a copy
	if p.conn, err = net.FileConn(ours); err != nil {
		return err
	}
	p.answers = json.NewDecoder(p.conn)
	p.cmd = exec.Command("/proc/self/exe", os.Args[1:]...)
	p.cmd.Env, p.cmd.Stderr, p.cmd.ExtraFiles = append(os.Environ(), probeEnv+"=1"), os.Stderr, []*os.File{theirs}
	p.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.reaped = make(chan struct{})
	go func() {
		_ = p.cmd.Wait() // it is always killed
		close(p.reaped)
	}()
	return nil
}

func (p *gpuProbe) begin(s *Setup) error {
	if err := p.conn.SetDeadline(time.Now().Add(s.Within)); err != nil {
		return err
	}
	a, err := p.ask(&probeOrder{GPU: s.GPU, Tables: s.Tables})
	p.before, p.facts = a.Free, a.Facts
	return err
}

func (p *gpuProbe) ask(o *probeOrder) (a probeAnswer, err error) {
	if err = json.NewEncoder(p.conn).Encode(o); err == nil {
		err = p.answers.Decode(&a)
	}
	return a, err
}

// measureContext measures how much of the GPU's memory was taken since begin.
func (p *gpuProbe) measureContext() cudaipc.GPUFacts {
	if p.before == 0 {
		return p.facts
	}
	a, err := p.ask(&probeOrder{})
	switch {
	case err != nil:
		p.facts.Problem = fmt.Sprintf("the GPU memory that this process takes was not measured: %v", err)
	case a.Free >= p.before:
		p.facts.Problem = "the GPU memory that this process takes was not measured: " +
			"others gave some back meanwhile, or it takes none"
	default:
		p.facts.Context = p.before - a.Free
	}
	return p.facts
}

// end ends the probe, and does not wait for one that hangs in the driver.
func (p *gpuProbe) end() {
	if p.conn != nil {
		_ = p.conn.Close()
	}
	if p.reaped != nil {
		_ = p.cmd.Process.Kill() // it has nothing to clean up
	}
}

// wait ends the probe and waits up to probeEnd. It returns false if there was none, or if it
// hangs.
func (p *gpuProbe) wait() bool {
	p.end()
	if p.reaped == nil {
		return false
	}
	select {
	case <-p.reaped:
		return true
	case <-time.After(probeEnd):
		return false
	}
}

// runProbe serves orders until the mover closes its end of the socket, whatever the driver does
// meanwhile.
func runProbe() error {
	conn := os.NewFile(socketFD, "mover")
	orders := make(chan probeOrder)
	go func() {
		if err := answerOrders(orders, json.NewEncoder(conn)); err != nil {
			fmt.Fprintln(os.Stderr, "GPU probe:", err)
			os.Exit(1)
		}
	}()
	for in := json.NewDecoder(conn); ; {
		var o probeOrder
		if in.Decode(&o) != nil {
			return nil //nolint:nilerr // the mover has closed its end
		}
		orders <- o
	}
}

// answerOrders answers orders. Everything that it opens stays open until the process ends.
func answerOrders(orders <-chan probeOrder, out *json.Encoder) error {
	first := <-orders
	arena, err := unix.Mmap(-1, 0, cuda.MinPinPiece, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	d, err := cuda.Open(cuda.Options{GPU: first.GPU, Arena: arena, Ring: cuda.MinRing})
	if err != nil {
		return out.Encode(&probeAnswer{Facts: cudaipc.GPUFacts{Problem: fmt.Sprintf("nothing was measured: %v",
			err)}})
	}
	var facts cudaipc.GPUFacts
	if i := d.Info(); cudaipc.FindCopyTable(first.Tables, i.Name, i.Driver) == nil {
		facts = measure(d)
	}
	for {
		if err := out.Encode(&probeAnswer{Free: d.Info().Free, Facts: facts}); err != nil {
			return err
		}
		<-orders
	}
}

func measure(d *cuda.Device) cudaipc.GPUFacts {
	t, err := d.Calibrate(calibrateWithin)
	if err != nil {
		return cudaipc.GPUFacts{Problem: fmt.Sprintf("the copy paths were not measured: %v", err)}
	}
	return cudaipc.GPUFacts{Table: &t}
}

// openWithProbe opens a device beside a probe. If that fails, it tries again without one: the
// probe may hold the memory that the opening lacks.
func openWithProbe(s *Setup) (*cuda.Device, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := startProbe(s)
	defer p.end()
	s.Facts = p.facts
	d, err := openGPU(s)
	if err == nil {
		d.Learn(p.measureContext()) // the device is not shared yet
		return d, nil
	}
	if !p.wait() {
		return nil, err
	}
	s.Facts.Problem = fmt.Sprintf("the GPU memory that this process takes was not measured: "+
		"the GPU was opened only without the process that measures: %v", err)
	return openGPU(s)
}

// facts returns the known facts of the GPU, and whether the next process is to measure them. Only
// the first process measures, since the measuring may be what kills it.
func (m *Mover) facts() (measure bool, facts cudaipc.GPUFacts) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case m.mu.facts != nil:
		return false, *m.mu.facts
	case !m.opts.Measure:
		return false, cudaipc.GPUFacts{}
	case m.mu.history.starts > 1:
		return false, cudaipc.GPUFacts{Problem: "nothing was measured: the process that was to do it was lost"}
	}
	return true, cudaipc.GPUFacts{}
}

// inform passes a device's state on, and keeps its facts for later processes.
func (m *Mover) inform(text []byte) {
	var info cudaipc.CUDAInfo
	if len(text) == 0 || json.Unmarshal(text, &info) != nil {
		return // the host's device has no state
	}
	m.mu.Lock()
	if m.mu.facts == nil {
		m.mu.facts = &info.Facts
	}
	m.mu.Unlock()
	if m.opts.Informed != nil {
		m.opts.Informed(info)
	}
}
