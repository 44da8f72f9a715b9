package pagefault

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// page returns mapped memory of two pages, the second of which has no file page.
func page(t testing.TB) []byte {
	t.Helper()
	fd, err := unix.MemfdCreate("pagefault-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

// TestGuard expects a fault in guarded memory to end the function, to be the error, and to run its
// deferred calls.
func TestGuard(t *testing.T) {
	mem := page(t)
	ended, given := false, false
	var fault *Error
	err := Guard(mem, nil, func() {
		defer func() { given = true }()
		copy(mem[4000:], make([]byte, 200))
		ended = true
	})
	if !errors.As(err, &fault) || ended || !given {
		t.Errorf("%v, ended %v, given back %v", err, ended, given)
	}
	if err := Guard(nil, mem, func() { mem[4095] = 1 }); err != nil {
		t.Error(err)
	}
	if !Readable(mem, 4095) || Readable(mem, 4096) || Readable(mem, 8191) {
		t.Error("not the first page alone can be read")
	}
}

// TestGuardLetsOtherPanicsThrough expects a fault elsewhere, and any other panic, to be no page
// error.
func TestGuardLetsOtherPanicsThrough(t *testing.T) {
	mem := page(t)
	for name, f := range map[string]func(){
		"a fault elsewhere": func() { mem[5000] = 1 },
		"another panic":     func() { panic("other") },
		"an index":          func() { _ = mem[len(mem[:4096])*2] },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was swallowed", name)
				}
			}()
			_ = Guard(mem[:4096], nil, f)
		}()
	}
}

func BenchmarkGuard(b *testing.B) {
	mem := page(b)
	n := 0
	for b.Loop() {
		if Guard(mem, nil, func() { n += int(mem[17]) }) != nil {
			b.Fatal("faulted")
		}
	}
}
