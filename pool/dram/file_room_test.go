package dram

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// mounted mounts a file system for a pool's file until the test ends.
func mounted(t *testing.T, kind, options string) (path string) {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", kind, "-o", options, "none", dir).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: mounting a %s needs root: %v: %s", kind, err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "pool")
}

const hugePagesFile = "/proc/sys/vm/nr_hugepages"

// hugePagesFree returns the number of free pages of 2 MiB.
func hugePagesFree() (int64, error) {
	text, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// onHugePages mounts a hugetlbfs of n pages, which it reserves for the test if necessary.
func onHugePages(t *testing.T, n int) (path string) {
	t.Helper()
	if free, err := hugePagesFree(); err != nil || free < int64(n) {
		had, err := os.ReadFile(hugePagesFile)
		if err != nil {
			t.Skipf("SKIPPED: the kernel has no huge pages: %v", err)
		}
		all, _ := strconv.Atoi(strings.TrimSpace(string(had)))
		if err := os.WriteFile(hugePagesFile, fmt.Append(nil, all+n), 0); err != nil {
			t.Skipf("SKIPPED: setting huge pages aside needs root: %v", err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(hugePagesFile, had, 0); err != nil {
				t.Error(err)
			}
		})
		if free, err := hugePagesFree(); err != nil || free < int64(n) {
			t.Skipf("SKIPPED: %d huge pages could not be set aside, %d are free: %v", n, free, err)
		}
	}
	return mounted(t, "hugetlbfs", fmt.Sprintf("pagesize=2M,mode=0700,size=%dM", 2*n))
}

// TestPoolOnHugePages stores, reopens, and is killed in a storm, on hugetlbfs.
func TestPoolOnHugePages(t *testing.T) {
	path := onHugePages(t, 32)
	s := stormCheck{
		t: t, path: path, rng: rand.New(rand.NewPCG(1, 0)), stored: map[uint64]int{}, over: map[uint64]bool{},
	}
	for range 3 {
		s.round()
	}
	if s.expected == 0 || s.committed == 0 {
		t.Errorf("nothing was stored: %d committed, %d expected", s.committed, s.expected)
	}
	p := reopen(t, Options{Bytes: stormPool, SlabBytes: stormSlab, Path: path})
	defer closePool(t, p)
	if i := p.Info(); i.PageBytes != arena.HugePageBytes || i.Recovery.Cold != "" || i.Recovery.Entries == 0 {
		t.Errorf("%+v, recovery %+v", i, i.Recovery)
	}
	var held *HeldError
	if _, err := Open(Options{Bytes: stormPool, SlabBytes: stormSlab, Path: path}); !errors.As(err, &held) ||
		held.Process != os.Getpid() {
		t.Errorf("a second pool on the file: %v", err)
	}
}

// TestNoRoomAtTheStart checks that missing room is an error, not a signal, and leaves no file.
func TestNoRoomAtTheStart(t *testing.T) {
	for kind, path := range map[string]func(t *testing.T) string{
		"in huge pages":   func(t *testing.T) string { return onHugePages(t, 6) },
		"its file system": func(t *testing.T) string { return mounted(t, "tmpfs", "size=12m") },
	} {
		t.Run(kind, func(t *testing.T) {
			path := path(t)
			p, err := Open(Options{Bytes: stormPool, SlabBytes: stormSlab, Path: path})
			if err == nil {
				closePool(t, p)
			}
			if err == nil || !strings.Contains(err.Error(), kind) || !strings.Contains(err.Error(), "no room for") {
				t.Errorf("%v", err)
			}
			if _, err := os.Stat(path); err == nil {
				t.Error("a file was left over")
			}
		})
	}
}

// TestNoRoomInFlight checks that a slab without room for its headers is not used, that stored
// blocks stay, and that nothing without memory is accessed. When there is room again, it is used.
func TestNoRoomInFlight(t *testing.T) {
	path := mounted(t, "tmpfs", "size=16m")
	p := reopen(t, Options{Bytes: 8 << 20, SlabBytes: 64 << 10, Path: path})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	first := randomChain(nil, 1, 100)
	put(t, p, id, first)
	rest := filepath.Join(filepath.Dir(path), "rest")
	fillUp(t, rest)
	more := randomChain(nil, 2, 6000)
	if stored := putWhatFits(p, id, more); stored == 0 || stored == more.N {
		t.Errorf("%d of %d blocks found room beside a full file system", stored, more.N)
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	if p.core.file.TimesFull() == 0 {
		t.Error("nothing was refused")
	}
	if err := os.Remove(rest); err != nil {
		t.Fatal(err)
	}
	if stored := putWhatFits(p, id, randomChain(nil, 3, 6000)); stored != 6000 {
		t.Errorf("%d of 6000 blocks found room, although the file system has it", stored)
	}
}

// TestFullFileSystemKeepsNothingOut checks that blocks make way for others where no slab more gets
// memory for its headers, and that no lease does.
func TestFullFileSystemKeepsNothingOut(t *testing.T) {
	path := mounted(t, "tmpfs", "size=16m")
	p := reopen(t, Options{Bytes: 8 << 20, SlabBytes: 64 << 10, Path: path})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	put(t, p, id, randomChain(nil, 1, 1000))
	fillUp(t, filepath.Join(filepath.Dir(path), "rest"))
	p.SetPressure(func(int64) bool { t.Error("leases are to be revoked"); return false })
	for i := range 20 {
		h := randomChain(nil, i+2, 100)
		if stored := putWhatFits(p, id, h); stored != h.N {
			t.Errorf("chain %d: %d of %d blocks are stored", i, stored, h.N)
		}
	}
	if p.core.file.TimesFull() == 0 {
		t.Error("nothing was refused: the test proves nothing")
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
}

// fillUp allocates all that a file system has left.
func fillUp(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for b := make([]byte, arena.PageBytes); err == nil; {
		_, err = f.Write(b)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// putWhatFits stores the blocks of a chain that get a slot, and counts them.
func putWhatFits(p *Pool, id pool.SpaceID, h pool.Hashes) (stored int) {
	b := pool.Batch{
		Space: id, Epoch: p.Epoch(id), Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	p.Reserve(&b)
	for i := range b.Slots {
		if b.Status[i] == pool.OK {
			clear(p.base[b.Slots[i].Off:][:b.Slots[i].Len])
		}
	}
	p.Commit(b.Slots, b.Epoch, b.Status)
	for _, s := range b.Status {
		if s == pool.OK {
			stored++
		}
	}
	return stored
}

// TestTruncatedInFlight truncates the file of a running process. The process loses blocks and
// continues with the rest. The next one refuses half a file, and makes one anew that has its length
// again, or none.
func TestTruncatedInFlight(t *testing.T) {
	path := shmPath(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), StormEnv+"="+path, stormSeed+"=1")
	var said bytes.Buffer
	cmd.Stderr, cmd.ExtraFiles = &said, []*os.File{w}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	const most = 12000 // blocks committed after the cut, of which the pipe may hold 4,096: the pool more than once
	cut, after := false, 0
	for records := bufio.NewReader(r); after < most; {
		var record [stormRecord]byte
		if _, err := io.ReadFull(records, record[:]); err != nil {
			break
		}
		if cut && record[0] == saidCommitted {
			after++
		}
		if !cut {
			if err := os.Truncate(path, stormPool/2); err != nil {
				t.Fatal(err)
			}
			cut = true
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); after < most || said.Len() > 0 {
		t.Errorf("%d blocks were committed after the cut, then the process ended by %v: %.300s", after, err, &said)
	}
	o := Options{Bytes: stormPool, SlabBytes: stormSlab, Path: path}
	if p, err := Open(o); err == nil || !strings.Contains(err.Error(), "no pool's") {
		t.Errorf("half a file: %v", err)
		if err == nil {
			closePool(t, p)
		}
	}
	l := arena.LayoutOf(o.Bytes, o.SlabBytes, arena.PageBytes)
	for _, size := range []int64{l.End, 0} {
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		p := reopen(t, o)
		if rec := p.Info().Recovery; rec.New != (size == 0) || (rec.Cold != "") != (size > 0) || rec.Entries != 0 {
			t.Errorf("a file of %d bytes: %+v", size, rec)
		}
		closePool(t, p)
		if size > 0 {
			if err := os.Truncate(path, stormPool/2); err != nil {
				t.Fatal(err)
			}
		}
	}
}
