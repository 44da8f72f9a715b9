package main

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestServersDoNotFillTheLog: what a tier's server sends unasked is not in the agent's log, where
// net/http writes it, once for each connection.
func TestServersDoNotFillTheLog(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var closed atomic.Int64
	answer := "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" + strings.Repeat("unasked ", 200)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					if _, err := http.ReadRequest(in); err != nil {
						closed.Add(1)
						return
					}
					_, _ = c.Write([]byte(answer))
				}
			}()
		}
	}()
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "key")
	_, dir, log := startServe(t, "--tier-state", t.TempDir(),
		"--tier", "s3://bucket?region=x&tls=off&endpoint="+l.Addr().String())
	if out, code := kvagentOutput(t, "mock", "--requests", "3", "--socket-dir", dir); code != 0 {
		t.Fatal(out)
	}
	pooltest.Until(t, "lost connections", func() bool { return closed.Load() > 0 })
	if text := log.String(); strings.Contains(text, "unasked unasked") {
		t.Errorf("the log has what a server sent: %s", text)
	}
}
