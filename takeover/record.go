package takeover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/dram"
)

// An agent that dies may leave blocked movers, which keep the pool's file locked and the engines'
// sockets open. So it records its movers in the socket directory, and its successor ends them. A
// process is identified by its number and its start time, within a boot of the machine and a PID
// namespace.

// File is the content of the record.
type File struct {
	Machine   string  `json:"machine"`   // the kernel's boot_id
	Namespace uint64  `json:"namespace"` // inode of the PID namespace
	Movers    []Mover `json:"movers"`
}

// Mover is one process.
type Mover struct {
	Process
	Agent Process `json:"agent"` // the agent that started it
}

// Process is one process of a PID namespace and a boot of the machine.
type Process struct {
	PID   int    `json:"pid"`
	Began uint64 `json:"began"` // start time, clock ticks since the machine's boot
}

// maxMoversFile bounds the file's size, bytes: some thousand movers.
const maxMoversFile = 1 << 20

// Record writes the file of this agent.
type Record struct {
	path  string
	agent Process
	log   *zap.Logger

	mu      sync.Mutex
	file    File
	stopped bool
}

// NewRecord replaces the list of the previous agents. It keeps the movers in left, so that the next
// agent knows them too.
func NewRecord(dir string, left []Mover, log *zap.Logger) *Record {
	r := &Record{
		path: filepath.Join(dir, socketdir.MoversFile), log: log,
		agent: Process{os.Getpid(), dram.ProcessBegan(os.Getpid())},
		file:  File{Machine: machineID(), Namespace: namespaceID(), Movers: left},
	}
	r.write()
	return r
}

// Update adds a process that has started, or removes one that was reaped.
func (r *Record) Update(pid int, runs bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.file.Movers = slices.DeleteFunc(r.file.Movers, func(m Mover) bool { return m.Agent == r.agent && m.PID == pid })
	if runs {
		r.file.Movers = append(r.file.Movers, Mover{Process{pid, dram.ProcessBegan(pid)}, r.agent})
	}
	r.write()
}

// Drop removes a process of an earlier agent that has ended.
func (r *Record) Drop(p Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.file.Movers = slices.DeleteFunc(r.file.Movers, func(m Mover) bool { return m.Process == p })
	r.write()
}

// Stop ends all writing, because the directory passes to another agent. Remaining entries do no
// harm, because none of them can match another process.
func (r *Record) Stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
}

// write replaces the file, or removes it if there are no movers. r.mu is held, or r is new.
func (r *Record) write() {
	if r.stopped {
		return
	}
	err := r.replace()
	if err != nil {
		r.log.Error("movers are not recorded: a successor of this agent cannot end them", zap.String("path", r.path),
			zap.Error(err))
	}
}

func (r *Record) replace() error {
	if len(r.file.Movers) == 0 {
		if err := os.Remove(r.path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	text, err := json.Marshal(r.file)
	if err != nil {
		return err
	}
	next := r.path + ".lock" // a name that is allowed in the directory and is no socket
	if err := writeNew(next, text); err != nil {
		return err
	}
	return os.Rename(next, r.path)
}

// newFileTries is how often writeNew tries to create its file while another process creates one of
// that name.
const newFileTries = 2

// writeNew writes a file that it creates itself. The directory's group can create files in it too,
// so an existing file, link or pipe is removed and never opened.
func writeNew(path string, text []byte) error {
	for try := 1; ; try++ {
		_ = os.Remove(path) // a failure shows in the next call
		file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if errors.Is(err, fs.ErrExist) && try < newFileTries {
			continue
		}
		if err != nil {
			return err
		}
		_, err = file.Write(text)
		return errors.Join(err, file.Close())
	}
}

// ReadMovers reads the previous agent's record; a missing one is no error.
func ReadMovers(dir string) (f File, err error) {
	path := filepath.Join(dir, socketdir.MoversFile)
	fd, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return File{}, nil
	}
	if err != nil {
		return File{}, err
	}
	defer fd.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(fd.Fd()), &st); err != nil {
		return File{}, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 ||
		st.Size > maxMoversFile {
		return File{}, fmt.Errorf("%s: uid %d, mode %o, %d bytes, allowed: a file of uid %d that only it can write, "+
			"at most %d bytes",
			path, st.Uid, st.Mode, st.Size, os.Geteuid(), maxMoversFile)
	}
	text := make([]byte, st.Size)
	if _, err := fd.ReadAt(text, 0); err != nil {
		return File{}, err
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return File{}, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

func machineID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

func namespaceID() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return 0
	}
	return st.Ino
}
