package mooncake

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// node is memory and what reads it.
type node struct {
	*Reads
	memory Memory
	states chan error
}

const nodeBytes = 1 << 20

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newNode(t *testing.T, change func(*ReadsOptions)) *node {
	t.Helper()
	source, err := filepath.Abs("../../python")
	check(t, err)
	n := &node{states: make(chan error, 64)}
	n.memory, err = newMemory(nodeBytes)
	check(t, err)
	o := ReadsOptions{
		Host: "127.0.0.1", Arena: n.memory, Python: servertest.MooncakePython(t), Env: []string{"PYTHONPATH=" + source},
		OnState: func(reason error) { n.states <- reason },
	}
	if change != nil {
		change(&o)
	}
	n.Reads, err = OpenReads(o)
	check(t, err)
	t.Cleanup(func() {
		check(t, n.Close())
		check(t, n.memory.close())
	})
	return n
}

// ready waits until the node's helper is there, and returns how its memory is reached.
func (n *node) ready(t *testing.T) (e pool.Exposed) {
	t.Helper()
	pooltest.Until(t, "a helper", func() bool {
		var err error
		e, err = n.Exposed()
		return err == nil
	})
	return e
}

func (n *node) pid() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.helper.cmd.Process.Pid
}

func fill(p []byte, seed byte) {
	for i := range p {
		p[i] = byte(i) + byte(i>>8)*3 + seed
	}
}

// Pieces of another node's memory arrive where they are to, byte for byte, by Mooncake's own engine
// over TCP. A read that fails costs the helper, and the next one goes on.
func TestReadsOfAnotherNode(t *testing.T) {
	from, to := newNode(t, nil), newNode(t, nil)
	fill(from.memory.Base, 7)
	at := from.ready(t)
	to.ready(t)
	if at.Protocol != "tcp" || !strings.HasPrefix(at.Target, "127.0.0.1:") || at.Address == 0 {
		t.Fatalf("%+v", at)
	}
	read := func(pieces int) error {
		clear(to.memory.Base)
		var pulls []pool.Pull
		for i := range int64(pieces) {
			pulls = append(pulls, pool.Pull{Offset: i * 8192, Length: 5000 + i, Address: at.Address + uint64(i*8000)})
		}
		if err := to.Read(at.Target, pulls); err != nil {
			return err
		}
		for i := range int64(pieces) {
			got, want := to.memory.Base[i*8192:(i+1)*8192], from.memory.Base[i*8000:][:5000+i]
			if !bytes.Equal(got[:5000+i], want) || len(bytes.Trim(got[5000+i:], "\x00")) > 0 {
				t.Errorf("piece %d of %d is wrong", i, pieces)
			}
		}
		return nil
	}
	for _, pieces := range []int{1, 64, maxPulls} {
		check(t, read(pieces))
	}
	before := to.pid()
	if err := to.Read(at.Target, []pool.Pull{{Length: 4096, Address: at.Address + nodeBytes}}); err == nil {
		t.Error("memory beyond the arena was read")
	}
	to.ready(t)
	pooltest.Until(t, "another helper", func() bool {
		_, err := to.Exposed()
		return err == nil && to.pid() != before
	})
	check(t, read(2))
	for _, n := range []int{0, maxPulls + 1} {
		err := to.Read(at.Target, make([]pool.Pull, n))
		if err == nil || !strings.Contains(err.Error(), "allowed: 1 to") {
			t.Errorf("%d pieces: %v", n, err)
		}
	}
}

// A read from a helper that stands still ends within its time, by the end of this side's helper;
// the reads beside it end with it. One from a helper that is gone fails, too.
func TestReadsFromAFrozenNode(t *testing.T) {
	from, to := newNode(t, nil), newNode(t, func(o *ReadsOptions) { o.Within = 300 * time.Millisecond })
	at := from.ready(t)
	to.ready(t)
	pull := []pool.Pull{{Length: 4096, Address: at.Address}}
	check(t, to.Read(at.Target, pull))
	before := to.pid()
	check(t, syscall.Kill(from.pid(), syscall.SIGSTOP))
	servertest.AwaitStop(t, from.pid())
	results := make(chan error)
	for range 3 {
		go func() { results <- to.Read(at.Target, pull) }()
	}
	for range 3 {
		if err := <-results; !errors.Is(err, errDied) {
			t.Errorf("ended with %v", err)
		}
	}
	if err := syscall.Kill(before, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the helper is there after its reads have ended: %v", err)
	}
	check(t, syscall.Kill(from.pid(), syscall.SIGKILL))
	to.ready(t)
	if err := to.Read(at.Target, pull); err == nil {
		t.Error("a killed helper's memory was read")
	}
}

// A library or device that the machine lacks is reported, once, and nothing is read.
func TestReadsThatCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*ReadsOptions)
		want   string
	}{
		"no Python":      {func(o *ReadsOptions) { o.Python = "/nowhere/python3" }, "/nowhere/python3"},
		"no kvagent":     {func(o *ReadsOptions) { o.Env = []string{"PYTHONPATH="} }, "No module named"},
		"no RDMA device": {func(o *ReadsOptions) { o.Protocol, o.Devices = "rdma", "mlx5_99" }, "mlx5_99"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := os.Stat("/sys/class/infiniband/mlx5_99"); err == nil {
				t.Skip("there is such a device")
			}
			n := newNode(t, c.change)
			if err := <-n.states; err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the reason is %v, want %q in it", err, c.want)
			}
			if _, err := n.Exposed(); err == nil {
				t.Error("its memory is exposed")
			}
			if err := n.Read("127.0.0.1:1", make([]pool.Pull, 1)); !errors.Is(err, ErrNotConnected) {
				t.Errorf("a read ends with %v", err)
			}
		})
	}
}

func TestReadsOptions(t *testing.T) {
	ok := ReadsOptions{Host: "h", Arena: Memory{Base: make([]byte, 1)}}
	for name, c := range map[string]struct {
		change func(*ReadsOptions)
		want   string
	}{
		"protocol": {func(o *ReadsOptions) { o.Protocol = "smoke" }, "Protocol"},
		"devices":  {func(o *ReadsOptions) { o.Devices = "a" }, "Devices"},
		"blank":    {func(o *ReadsOptions) { o.Protocol, o.Devices = "rdma", "a b" }, "Devices"},
		"no host":  {func(o *ReadsOptions) { o.Host = "" }, "Host"},
		"host":     {func(o *ReadsOptions) { o.Host = strings.Repeat("h", pool.MaxTarget) }, "Host"},
		"arena":    {func(o *ReadsOptions) { o.Arena = Memory{} }, "Arena"},
	} {
		o := ok
		c.change(&o)
		if _, err := OpenReads(o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
