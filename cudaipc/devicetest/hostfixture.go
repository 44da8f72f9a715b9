package devicetest

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/cudaipc/host"
)

// Host opens the host device with an arena of arenaSize bytes. Regions are of the given kind:
// cudaipc.KindFD or cudaipc.KindPeer. The test's end closes everything.
func Host(t T, arenaSize int64, kind cudaipc.Kind) Fixture {
	t.Helper()
	fd, arena := newArena(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	host := host.Open(arena)
	t.Cleanup(func() { closeDevice(t, host) })
	engine := func(t T, s Spec) Engine { return HostEngine(t, s, kind) }
	return Fixture{Device: host, Arena: arena, Engine: engine}
}

// newArena returns an arena as this process sees it, until the test ends, and its descriptor, which
// is the caller's.
func newArena(t T, size int64) (fd int, arena []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("devicetest-arena", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if arena, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(arena) })
	return fd, arena
}

func closeDevice(t T, d cudaipc.Device) {
	t.Helper()
	if err := d.Close(); err != nil && !errors.Is(err, cudaipc.ErrLost) { // its use has told that
		t.Errorf("closing the device: %v", err)
	}
}

// process is an engine in a child process, seen from its parent.
type process struct {
	cmd  *exec.Cmd
	kind cudaipc.Kind
	desc described

	mu  sync.Mutex // one operation at a time
	in  *gob.Encoder
	out *gob.Decoder
	end io.Closer

	killed sync.Once
}

// HostEngine starts this binary once more as an engine, with its own arguments.
func HostEngine(t T, s Spec, kind cudaipc.Kind) Engine {
	t.Helper()
	p, err := startProcess(s, kind, "1")
	if err != nil {
		t.Fatalf("engine: %v", err)
	}
	t.Cleanup(p.Kill)
	return p
}

func startProcess(s Spec, kind cudaipc.Kind, env string) (*process, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), childEnv+"="+env)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, kind: kind, in: gob.NewEncoder(in), out: gob.NewDecoder(out), end: in}
	err = errors.Join(p.in.Encode(s), p.out.Decode(&p.desc))
	if err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Import opens the child's descriptors as SCM_RIGHTS would give them.
func (p *process) Import() (im cudaipc.Import, err error) {
	im = cudaipc.Import{Pid: p.cmd.Process.Pid, GPU: p.desc.GPU}
	for _, r := range append([]cudaipc.Region{p.desc.Words}, p.desc.Regions...) {
		if r.ID != engine.SyncRegion && p.kind == cudaipc.KindPeer {
			r.Kind = cudaipc.KindPeer
		} else if r.Kind == cudaipc.KindCUDA {
			im.Regions = append(im.Regions, r)
			continue
		} else if r.FD, err = p.descriptor(r.FD); err != nil {
			return im, fmt.Errorf("region %d: %w", r.ID, err)
		}
		im.Regions = append(im.Regions, r)
	}
	sync := p.desc.Sync
	im.Sync = &sync
	return im, nil
}

// descriptor returns a descriptor of the child, in this process.
func (p *process) descriptor(fd int) (int, error) {
	child, err := unix.PidfdOpen(p.cmd.Process.Pid, 0)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(child) }()
	return unix.PidfdGetfd(child, fd, 0)
}

func (p *process) Do(op Op) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var a answer
	if err := p.in.Encode(op); err != nil {
		return nil, err
	}
	if err := p.out.Decode(&a); err != nil {
		return nil, err
	}
	if a.Err != "" {
		return nil, errors.New(a.Err)
	}
	return a.Data, nil
}

func (p *process) Kill() {
	p.killed.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		_ = p.end.Close()
	})
}
