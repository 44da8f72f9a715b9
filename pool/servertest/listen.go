package servertest

import (
	"context"
	"net"
	"runtime"
	"sync"
	"testing"
)

// MaxAllocated is what a wrong answer of a server may make the process allocate, in bytes.
const MaxAllocated = 64 << 20

// Listen listens on a free port of the loopback address until the test ends, and calls serve for
// each connection, which it then closes.
func Listen(t testing.TB, serve func(nc net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context() // a fuzz target may not call it
	var open sync.WaitGroup
	open.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(ctx, func() { nc.Close() })
			open.Go(func() {
				defer stop()
				defer nc.Close()
				serve(nc)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		open.Wait()
	})
	return l.Addr().String()
}

// Allocated returns the bytes that the process has allocated since it began.
func Allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}
