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

// A witness is a process that a mover starts once, before it opens its GPU, and ends behind that. It opens the GPU first, and so can
// measure what the mover cannot: the copy paths, with no engine's copies beside, and where a driver call that never returns
// costs the witness alone; and how much of the GPU's memory the mover's own opening takes, which nobody can ask for who has not
// opened it. Without its answer the device opens all the same, and Facts say why.
//
//	mover                              witness (the same binary, the same command)
//	order: GPU, tables  ────────────▶  opens the GPU; measures, if no table is of it
//	                    ◀────────────  facts, free bytes
//	opens the GPU
//	order: again        ────────────▶
//	                    ◀────────────  free bytes
//	closes its end      ────────────▶  ends
type witness struct {
	cmd    *exec.Cmd
	conn   net.Conn
	says   *json.Decoder
	reaped chan struct{} // closed when the process is gone; nil: it was not started
	before int64         // bytes of the GPU that were free before the mover opened it
	facts  cudaipc.GPUFacts
}

// witnessEnd is how long an opening that failed beside a witness waits for the witness's end, and so for what it held of the GPU.
const witnessEnd = 5 * time.Second

// calibrateWithin is cuda.Device.Calibrate's time, but in tests.
var calibrateWithin = cuda.CalibrateWithin

// witnessOrder is a line to a witness. The first one names the GPU.
type witnessOrder struct {
	GPU    cudaipc.UUID
	Tables []cudaipc.CopyTable
}

// witnessAnswer is its line back.
type witnessAnswer struct {
	Free  int64 // bytes of the GPU, now
	Facts cudaipc.GPUFacts
}

// startWitness starts a witness and has it measure. It is called, and taken asked, on one locked thread: with that thread's end
// the kernel kills the witness. On an error the facts' Problem says it, and there is nothing to be ended.
func startWitness(s *Setup) *witness {
	w := &witness{}
	err := w.start()
	if err == nil {
		err = w.begin(s)
	}
	if err != nil {
		w.facts = cudaipc.GPUFacts{Problem: fmt.Sprintf("nothing was measured: %v", err)}
	}
	return w
}

func (w *witness) start() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "witness"), os.NewFile(uintptr(pair[1]), "witness")
	defer theirs.Close()
	defer ours.Close() // FileConn has a copy
	if w.conn, err = net.FileConn(ours); err != nil {
		return err
	}
	w.says = json.NewDecoder(w.conn)
	w.cmd = exec.Command("/proc/self/exe", os.Args[1:]...)
	w.cmd.Env, w.cmd.Stderr, w.cmd.ExtraFiles = append(os.Environ(), witnessEnv+"=1"), os.Stderr, []*os.File{theirs}
	w.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := w.cmd.Start(); err != nil {
		return err
	}
	w.reaped = make(chan struct{})
	go func() {
		_ = w.cmd.Wait() // it is killed in the end
		close(w.reaped)
	}()
	return nil
}

func (w *witness) begin(s *Setup) error {
	if err := w.conn.SetDeadline(time.Now().Add(s.Within)); err != nil {
		return err
	}
	a, err := w.ask(&witnessOrder{GPU: s.GPU, Tables: s.Tables})
	w.before, w.facts = a.Free, a.Facts
	return err
}

func (w *witness) ask(o *witnessOrder) (a witnessAnswer, err error) {
	if err = json.NewEncoder(w.conn).Encode(o); err == nil {
		err = w.says.Decode(&a)
	}
	return a, err
}

// taken notes how much of the GPU's memory went since begin.
func (w *witness) taken() cudaipc.GPUFacts {
	if w.before == 0 {
		return w.facts
	}
	a, err := w.ask(&witnessOrder{})
	switch {
	case err != nil:
		w.facts.Problem = fmt.Sprintf("the GPU memory that this process takes was not measured: %v", err)
	case a.Free >= w.before:
		w.facts.Problem = "the GPU memory that this process takes was not measured: others gave some back meanwhile, or it takes none"
	default:
		w.facts.Context = w.before - a.Free
	}
	return w.facts
}

// end ends the witness, and does not wait for one that hangs in the driver.
func (w *witness) end() {
	if w.conn != nil {
		_ = w.conn.Close()
	}
	if w.reaped != nil {
		_ = w.cmd.Process.Kill() // it has nothing to put in order
	}
}

// gone ends the witness and waits for that, for a bounded time; false: there was none, or it hangs.
func (w *witness) gone() bool {
	w.end()
	if w.reaped == nil {
		return false
	}
	select {
	case <-w.reaped:
		return true
	case <-time.After(witnessEnd):
		return false
	}
}

// runWitness is the life of the process. It ends with the mover's end of the socket, whatever the driver does meanwhile.
func runWitness() error {
	conn := os.NewFile(socketFD, "mover")
	orders := make(chan witnessOrder)
	go func() {
		if err := bearWitness(orders, json.NewEncoder(conn)); err != nil {
			fmt.Fprintln(os.Stderr, "witness:", err)
			os.Exit(1)
		}
	}()
	for in := json.NewDecoder(conn); ; {
		var o witnessOrder
		if in.Decode(&o) != nil {
			return nil //nolint:nilerr // the mover has closed its end
		}
		orders <- o
	}
}

// bearWitness answers orders. What it has open is the process's to the end.
func bearWitness(orders <-chan witnessOrder, out *json.Encoder) error {
	first := <-orders
	arena, err := unix.Mmap(-1, 0, cuda.MinPinPiece, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	d, err := cuda.Open(cuda.Options{GPU: first.GPU, Arena: arena, Ring: cuda.MinRing})
	if err != nil {
		return out.Encode(&witnessAnswer{Facts: cudaipc.GPUFacts{Problem: fmt.Sprintf("nothing was measured: %v", err)}})
	}
	var facts cudaipc.GPUFacts
	if i := d.Info(); cudaipc.FindCopyTable(first.Tables, i.Name, i.Driver) == nil {
		facts = measure(d)
	}
	for {
		if err := out.Encode(&witnessAnswer{Free: d.Info().Free, Facts: facts}); err != nil {
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

// openWitnessed opens a device beside a witness; where that fails, without it: what it holds of a GPU may be what the opening lacks.
func openWitnessed(s *Setup) (*cuda.Device, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	w := startWitness(s)
	defer w.end()
	s.Facts = w.facts
	d, err := openGPU(s)
	if err == nil {
		d.Learn(w.taken()) // nobody else has the device yet
		return d, nil
	}
	if !w.gone() {
		return nil, err
	}
	s.Facts.Problem = fmt.Sprintf("the GPU memory that this process takes was not measured: the GPU was opened only without the process that measures: %v", err)
	return openGPU(s)
}

// facts are what the next process is told of its GPU, and whether it is to find out: only the first is, for what it does then may be
// what it is lost by.
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

// inform tells on what a device said of itself, and keeps its facts for the processes that follow.
func (m *Mover) inform(text []byte) {
	var info cudaipc.CUDAInfo
	if len(text) == 0 || json.Unmarshal(text, &info) != nil {
		return // the host's device says nothing
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
