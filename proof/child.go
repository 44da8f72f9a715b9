package proof

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// Orders to a process that plays an engine or an agent. One packet each way: an order, then its
// answer. Descriptors go with them.
const (
	opEngine  = "engine"  // be an engine with regions of Sizes
	opAgent   = "agent"   // be an agent with an arena of Sizes[0]; then Import if Peer is not 0
	opFill    = "fill"    // pattern Seed over all of Region, at once
	opCheck   = "check"   // how many bytes of Region are not pattern Seed
	opProduce = "produce" // a step: after Delay a kernel makes all of Region Word, then step word Step and event 0
	opHold    = "hold"    // the stream waits for ever; event 0 after that
	opLoop    = "loop"    // a kernel over Len bytes of Region, Rounds times: p50 and p99
	opCopy    = "copy"    // agent: copy all of Region, both ways, for ever
)

// order is one packet to a child.
type order struct {
	Op      string           `json:"op"`
	Sizes   []int64          `json:"sizes,omitempty"`
	Virtual bool             `json:"virtual,omitempty"`
	Piece   int64            `json:"piece,omitempty"`
	Region  cudaipc.RegionID `json:"region,omitempty"`
	Len     int64            `json:"len,omitempty"`
	Seed    uint64           `json:"seed,omitempty"`
	Word    uint32           `json:"word,omitempty"`
	Delay   time.Duration    `json:"delay,omitempty"`
	Step    uint64           `json:"step,omitempty"`
	Rounds  int              `json:"rounds,omitempty"`
	Import  *cudaipc.Import  `json:"import,omitempty"`
}

// answer is one packet back.
type answer struct {
	Err     string           `json:"err,omitempty"`
	GPU     cudaipc.UUID     `json:"gpu"`
	Regions []cudaipc.Region `json:"regions,omitempty"` // the words last
	Sync    *cudaipc.Sync    `json:"sync,omitempty"`
	Wrong   int64            `json:"wrong,omitempty"`
	P50     float64          `json:"p50,omitempty"` // us
	P99     float64          `json:"p99,omitempty"`
}

// Limits of a packet.
const (
	maxPacket      = 128 << 10 // bytes
	maxDescriptors = 250
	controlFD      = 3 // the child's end
)

// child is a process that plays an engine or an agent.
type child struct {
	cmd     *exec.Cmd
	control int
	self    answer // of its first order
	fds     []int  // of self, the parent's
	gone    bool
}

// start starts a child with its first order.
func (b *bench) start(first *order, fds ...int) (*child, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "control")
	defer theirs.Close()
	command := b.o.self()
	c := &child{cmd: exec.CommandContext(b.ctx, command[0], command[1:]...), control: pair[0]}
	c.cmd.Stderr, c.cmd.ExtraFiles, c.cmd.Env = os.Stderr, []*os.File{theirs}, append(os.Environ(), childEnv+"=1")
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.cmd.Start(); err != nil {
		_ = unix.Close(c.control)
		return nil, err
	}
	b.children = append(b.children, c)
	limit := unix.NsecToTimeval(answerWithin.Nanoseconds())
	if err := unix.SetsockoptTimeval(c.control, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return nil, err
	}
	if err := send(c.control, first, fds...); err != nil {
		return nil, err
	}
	c.fds, err = receive(c.control, &c.self)
	if err == nil && c.self.Err != "" {
		err = fmt.Errorf("%s: %s", first.Op, c.self.Err)
	}
	return c, err
}

// do makes a child execute an order.
func (c *child) do(o *order) (answer, error) {
	var a answer
	if err := send(c.control, o); err != nil {
		return a, fmt.Errorf("%s: %w", o.Op, err)
	}
	_, err := receive(c.control, &a)
	if errors.Is(err, unix.EAGAIN) {
		err = fmt.Errorf("the process did not answer in time, which is %v", answerWithin)
	}
	if err != nil {
		return a, fmt.Errorf("%s: %w", o.Op, err)
	}
	if a.Err != "" {
		return a, fmt.Errorf("%s: %s", o.Op, a.Err)
	}
	return a, nil
}

// describe returns an import of all memory and words of an engine, with descriptors of its own.
func (c *child) describe(peer cudaipc.PeerID) (cudaipc.Import, error) {
	im := cudaipc.Import{Peer: peer, Pid: c.cmd.Process.Pid, GPU: c.self.GPU, Sync: c.self.Sync}
	next := 0
	for _, r := range c.self.Regions {
		if withFD(&r) {
			r.FD = c.fds[next]
			next++
			var err error
			if r, err = r.Dup(); err != nil {
				return im, err
			}
		}
		im.Regions = append(im.Regions, r)
	}
	return im, nil
}

func withFD(r *cudaipc.Region) bool {
	return r.Kind == cudaipc.KindFD || r.Kind == cudaipc.KindCUDAFD
}

// killNow kills a child and does not wait.
func (c *child) killNow() { _ = c.cmd.Process.Kill() }

// kill kills a child and waits for its end.
func (c *child) kill() {
	if c.gone {
		return
	}
	c.gone = true
	c.killNow()
	_ = c.cmd.Wait() // it was killed
	for _, fd := range append(c.fds, c.control) {
		_ = unix.Close(fd)
	}
}

// send sends one packet with descriptors, which stay the caller's.
func send(control int, packet any, fds ...int) error {
	text, err := json.Marshal(packet)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	return unix.Sendmsg(control, text, rights, nil, unix.MSG_NOSIGNAL)
}

// receive receives one packet. The caller owns its descriptors.
func receive(control int, packet any) ([]int, error) {
	text, rights := make([]byte, maxPacket), make([]byte, unix.CmsgSpace(4*maxDescriptors))
	n, m, _, _, err := unix.Recvmsg(control, text, rights, unix.MSG_CMSG_CLOEXEC)
	for err == unix.EINTR { //nolint:errorlint // an errno, which nothing wraps
		n, m, _, _, err = unix.Recvmsg(control, text, rights, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, fmt.Errorf("the other process has ended")
	}
	var fds []int
	messages, err := unix.ParseSocketControlMessage(rights[:m])
	for i := range messages {
		if more, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, more...)
		}
	}
	if err == nil {
		err = json.Unmarshal(text[:n], packet)
	}
	return fds, err
}
