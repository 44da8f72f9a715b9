package host

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

const arenaSize = 4 << 20

func memfd(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("host-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&mem[0]))) }

func openHost(t *testing.T) *Device {
	t.Helper()
	fd := memfd(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	arena, err := cudaipc.MapFD(fd, arenaSize)
	if err != nil {
		t.Fatal(err)
	}
	h := Open(arena)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("closing the device: %v", err)
		}
	})
	return h
}

// open imports a peer, until the test's end.
func open(t *testing.T, h *Device, im cudaipc.Import) cudaipc.Peer {
	t.Helper()
	p, err := h.Import(im)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func copyAll(t *testing.T, p cudaipc.Peer, c *cudaipc.Copy) cudaipc.Done {
	t.Helper()
	ticket, err := p.Copy(c)
	if err != nil {
		t.Fatal(err)
	}
	d, ok, err := ticket(30 * time.Second)
	if err != nil || !ok {
		t.Fatalf("Done: %v, %v", ok, err)
	}
	return d
}

func dupFD(t *testing.T, fd int) int {
	t.Helper()
	r, err := cudaipc.Region{FD: fd}.Dup()
	if err != nil {
		t.Fatal(err)
	}
	return r.FD
}

// TestPeerCutsOffItsMemory shortens the file under a mapping. It expects the blocks after the cut
// to be bad, those before it not, and this process to live.
func TestPeerCutsOffItsMemory(t *testing.T) {
	const block, blocks = 64 << 10, 16
	h := openHost(t)
	fd := memfd(t, block*blocks)
	defer func() { _ = unix.Close(fd) }()
	p := open(t, h, cudaipc.Import{Regions: []cudaipc.Region{{
		ID:   1,
		Kind: cudaipc.KindFD,
		Size: block * blocks,
		FD:   dupFD(t, fd),
	}}})
	for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
		c := &cudaipc.Copy{Dir: dir, Sum: true}
		for b := range blocks {
			c.Runs = append(c.Runs, cudaipc.Run{
				Region:    1,
				RegionOff: uint64(b) * block,
				ArenaOff:  int64(b) * block,
				Len:       block,
			})
			c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
		}
		if d := copyAll(t, p, c); d.Err != nil {
			t.Fatalf("before the cut: %v", d.Err)
		}
		if err := unix.Ftruncate(fd, block*blocks/2); err != nil {
			t.Fatal(err)
		}
		d := copyAll(t, p, c)
		for b := range blocks {
			if d.Bad == nil || d.Bad[b] != (b >= blocks/2) {
				t.Fatalf("direction %d, cut before block %d: bad blocks %v (%v)", dir, blocks/2, d.Bad, d.Err)
			}
		}
		if err := unix.Ftruncate(fd, block*blocks); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPeerCutsOffItsWords(t *testing.T) {
	h := openHost(t)
	fd := memfd(t, 8192)
	defer func() { _ = unix.Close(fd) }()
	p := open(t, h, cudaipc.Import{
		Regions: []cudaipc.Region{{ID: 0, Kind: cudaipc.KindFD, Size: 8192, FD: dupFD(t, fd)}},
		Sync:    &cudaipc.Sync{StepOff: 4096, EventsOff: 4160, Events: 1, RevokeOff: 4224, Revokes: 1},
	})
	poll := func() error { _, err := p.Poll(cudaipc.Wait{Event: 0, Revoke: 0}); return err }
	if err := poll(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if err := poll(); !errors.Is(err, cudaipc.ErrPeer) {
		t.Fatalf("Poll of words that went away: %v, want ErrPeer", err)
	}
}

func TestGuardLetsOtherFaultsThrough(t *testing.T) {
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	if err := pagefault.Guard(page, nil, func() { page[0] = 1 }); err == nil {
		t.Error("a fault in guarded memory is no error")
	}
	defer func() {
		if recover() == nil {
			t.Error("a fault outside of the guarded memory was swallowed")
		}
	}()
	_ = pagefault.Guard(make([]byte, 1), nil, func() { page[0] = 1 })
}

func TestImportTakesOnlyMemory(t *testing.T) {
	h := openHost(t)
	path := fileOnDisk(t)
	readOnly := memfd(t, 8192)
	path2 := filepath.Join("/proc/self/fd", strconv.Itoa(readOnly))
	for name, open := range map[string]func() (int, error){
		"a file on disk":      func() (int, error) { return unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0) },
		"a memfd to read":     func() (int, error) { return unix.Open(path2, unix.O_RDONLY|unix.O_CLOEXEC, 0) },
		"a file too short":    func() (int, error) { return memfd(t, 8191), nil },
		"no descriptor":       func() (int, error) { return -1, nil },
		"a closed descriptor": func() (int, error) { return 1 << 20, nil },
	} {
		fd, err := open()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.Import(cudaipc.Import{Regions: []cudaipc.Region{{
			Kind: cudaipc.KindFD,
			Size: 8192,
			FD:   fd,
		}}}); err == nil {
			t.Errorf("Import of %s: no error", name)
		}
	}
	_ = unix.Close(readOnly)
}

// fileOnDisk returns a file of 8 KiB that is not memory: beside the tests, for a temporary folder
// often is.
func fileOnDisk(t *testing.T) string {
	t.Helper()
	f, err := os.CreateTemp(".", "test-file-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(f.Name()) })
	if err := errors.Join(f.Truncate(8192), f.Close()); err != nil {
		t.Fatal(err)
	}
	var on unix.Statfs_t
	if err := unix.Statfs(f.Name(), &on); err != nil || on.Type == unix.TMPFS_MAGIC {
		t.Skipf("the tests lie in memory (%v): no file on disk to refuse", err)
	}
	return f.Name()
}

// TestMostRegions imports as many regions as there may be, and one more.
func TestMostRegions(t *testing.T) {
	h := openHost(t)
	fd := memfd(t, 4096)
	defer func() { _ = unix.Close(fd) }()
	for _, n := range []int{cudaipc.MaxRegions, cudaipc.MaxRegions + 1} {
		var im cudaipc.Import
		for i := range n {
			im.Regions = append(im.Regions, cudaipc.Region{
				ID:   cudaipc.RegionID(i),
				Kind: cudaipc.KindFD,
				Size: 4096,
				FD:   dupFD(t, fd),
			})
		}
		p, err := h.Import(im)
		if n > cudaipc.MaxRegions {
			if !errors.Is(err, cudaipc.ErrRange) {
				t.Errorf("Import of %d regions: %v, want ErrRange", n, err)
			}
			if _, err := unix.FcntlInt(uintptr(im.Regions[n-1].FD), unix.F_GETFD, 0); err == nil {
				t.Error("a refused import left its descriptors open")
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		d := copyAll(t, p, &cudaipc.Copy{
			Runs:   []cudaipc.Run{{Region: cudaipc.MaxRegions - 1, Len: 4096}},
			Blocks: []cudaipc.Block{{Runs: 1}},
		})
		if err := errors.Join(d.Err, p.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestMostBytesOfAPeer(t *testing.T) {
	h := openHost(t)
	im := cudaipc.Import{Pid: os.Getpid()}
	for i := range 3 {
		im.Regions = append(im.Regions, cudaipc.Region{
			ID:   cudaipc.RegionID(i),
			Kind: cudaipc.KindPeer,
			Size: cudaipc.MaxPeerBytes / 2,
			Addr: 4096,
		})
	}
	if _, err := h.Import(im); !errors.Is(err, cudaipc.ErrRange) {
		t.Errorf("Import of more than MaxPeerBytes: %v, want ErrRange", err)
	}
}

// TestPeerRangeThatIsNotThere has an unmapped page in a registered range and expects the blocks
// that touch it to be bad.
func TestPeerRangeThatIsNotThere(t *testing.T) {
	const page = 4096
	h := openHost(t)
	mem, err := unix.Mmap(-1, 0, 3*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	for i := range mem {
		mem[i] = byte(i % 251)
	}
	if err := unix.Mprotect(mem[page:2*page], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	p := open(t, h, cudaipc.Import{
		Pid:     os.Getpid(),
		Regions: []cudaipc.Region{{ID: 1, Kind: cudaipc.KindPeer, Size: 3 * page, Addr: addressOf(mem)}},
	})
	c := &cudaipc.Copy{Sum: true, Blocks: []cudaipc.Block{
		{Runs: 1}, {Runs: 1}, {Runs: 2}, {Runs: 1},
	}, Runs: []cudaipc.Run{
		{Region: 1, Len: page},
		{Region: 1, RegionOff: page / 2, ArenaOff: page, Len: page},
		{Region: 1, RegionOff: 0, ArenaOff: 2 * page, Len: page},
		{Region: 1, RegionOff: page, ArenaOff: 3 * page, Len: page},
		{Region: 1, RegionOff: 2 * page, ArenaOff: 4 * page, Len: page},
	}}
	d := copyAll(t, p, c)
	if d.Err == nil || d.Bad[0] || !d.Bad[1] || !d.Bad[2] || d.Bad[3] {
		t.Fatalf("bad blocks %v (%v), want the second and the third", d.Bad, d.Err)
	}
	if !bytes.Equal(h.arena[4*page:5*page], mem[2*page:]) {
		t.Error("the block after the bad ones did not arrive")
	}
}
