package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/mockengine"
)

// flip damages a block in the memory of an agent's pool, from outside: it flips a bit in the middle
// of the first layer of the prompt's first block. The agent has no part in it, as with failing
// memory.
func (r *replay) flip(ctx context.Context, a *agentProcess, prompt []uint64) error {
	content, err := mockengine.FirstBlock(&r.cfg, prompt)
	if err != nil {
		return err
	}
	st, err := a.status(ctx)
	if err != nil {
		return err
	}
	files, err := poolFiles(st.PID)
	if err != nil {
		return err
	}
	for _, path := range files {
		found, err := flipIn(path, content)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if found {
			return nil
		}
	}
	return fmt.Errorf("no stored block has the content that is to be damaged, in %d files", len(files))
}

// poolMemory is the prefix of the link of a descriptor that is a pool's memory without a file.
const poolMemory = "/memfd:kvagent-pool"

// poolFiles returns the descriptors, as paths, of a process's pool memory.
func poolFiles(pid int) (files []string, err error) {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range all {
		// An error means that it was closed meanwhile.
		if link, bad := os.Readlink(fd); bad == nil && strings.HasPrefix(link, poolMemory) {
			files = append(files, fd)
		}
	}
	return files, err
}

// flipIn flips a bit in the middle of the content where a file has it, through a mapping: a file of
// huge pages cannot be written to otherwise.
func flipIn(path string, content []byte) (found bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return false, err
	}
	at := bytes.Index(mem, content)
	if at >= 0 {
		mem[at+len(content)/2] ^= 1
	}
	return at >= 0, unix.Munmap(mem)
}
