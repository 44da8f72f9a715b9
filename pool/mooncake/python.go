package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// module is the helper's module in the Python package kvagent.
const module = "kvagent.mooncake"

// checkPython returns an error that names what is to be installed, if anything is, or the memory
// that Python takes with the client, in bytes.
func checkPython(o *Options) (memory int64, err error) {
	path, err := exec.LookPath(o.Python)
	if err != nil {
		return 0, fmt.Errorf("mooncake: Python is %q, which is not installed: install Python 3.10 or newer, "+
			"then pip install kvagent mooncake-transfer-engine: %w", o.Python, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-m", module, "check")
	cmd.Env = o.environment()
	out, err := cmd.CombinedOutput()
	if err == nil {
		usage, _ := cmd.ProcessState.SysUsage().(*syscall.Rusage)
		return usage.Maxrss << 10, nil
	}
	text := lastLine(out)
	if strings.Contains(text, "kvagent") && !strings.HasPrefix(text, module) {
		text += ": pip install kvagent mooncake-transfer-engine"
	}
	return 0, fmt.Errorf("mooncake: Python at %s: %w: %s", path, err, text)
}

func lastLine(out []byte) string {
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	return string(lines[len(lines)-1])
}

// environment returns the helper's environment: limits of its waiting, then what the caller set.
func (o *Options) environment() []string {
	rpc := strconv.FormatInt(o.RPCWithin.Milliseconds(), 10)
	env := append(os.Environ(), "MC_RPC_TIMEOUT_MS="+rpc, "MC_RPC_CONNECT_TIMEOUT_MS="+rpc, "PYTHONUNBUFFERED=1")
	return append(env, o.Env...)
}

// newMemory maps zeroed memory that can be shared.
func newMemory(bytes int64) (Memory, error) {
	fd, err := unix.MemfdCreate("kvagent-mooncake", unix.MFD_CLOEXEC)
	if err != nil {
		return Memory{}, fmt.Errorf("mooncake: bounce memory: memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, bytes); err == nil {
		var base []byte
		if base, err = unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			return Memory{Base: base, FD: fd}, nil
		}
	}
	return Memory{}, errors.Join(fmt.Errorf("mooncake: bounce memory of %d bytes: %w", bytes, err), unix.Close(fd))
}

func (m *Memory) close() error { return errors.Join(unix.Munmap(m.Base), unix.Close(m.FD)) }

// offset returns where data is in the memory, if all of it is.
func (m *Memory) offset(data []byte) (int64, bool) {
	if len(data) == 0 || len(data) > len(m.Base) {
		return 0, false
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(m.Base)))
	if at < base || at-base > uintptr(len(m.Base)-len(data)) {
		return 0, false
	}
	return int64(at - base), true
}

// hostName returns the name of this node if none was given.
func (s *Store) hostName() (string, error) {
	if s.o.Host != "" {
		return s.o.Host, nil
	}
	return os.Hostname()
}
