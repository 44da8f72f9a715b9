package peer

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/peer/allow"
)

// TestAllow: a host that a request names is connected to if its name, or its address, is allowed.
func TestAllow(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	for _, c := range []struct {
		allow, host string
		ok          bool
	}{
		{"", "127.0.0.1", true},
		{"127.0.0.0/8", "127.0.0.1", true},
		{"10.0.0.0/8, 127.0.0.1", "127.0.0.1", true},
		{"10.0.0.0/8", "127.0.0.1", false},
		{"10.0.0.0/8", "::ffff:127.0.0.1", false},
		{"127.0.0.0/8", "::ffff:127.0.0.1", true},
		{"fd00::/8", "127.0.0.1", false},
		{"localhost", "LocalHost", true},
		{"localhost.", "localhost", true},
		{"localhost", "127.0.0.1", false},
		{"example.com", "localhost", false},
		{"127.0.0.0/8,::1", "localhost", true},
		{"10.0.0.0/8", "localhost", false},
		{"localhost.example.com", "localhost", false},
		{"0.0.0.0/0", "::1", false},
	} {
		t.Run(c.allow+" "+c.host, func(t *testing.T) {
			s := serve(t, p.config())
			_, port, err := net.SplitHostPort(s.Addr().String())
			check(t, err)
			cfg := d.clientConfig()
			cfg.Allow, err = allow.Parse(c.allow)
			check(t, err)
			_, err = fetchAll(t, newClient(t, cfg), net.JoinHostPort(c.host, port), d.request("", chain("a", 1)))
			if c.ok {
				check(t, err)
				return
			}
			if !errors.Is(err, allow.ErrRefused) {
				t.Fatalf("%v, want %v", err, allow.ErrRefused)
			}
			for _, want := range []string{"remote_host", c.host, cfg.Allow.String(), "--peer-allow"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q in it", err, want)
				}
			}
			if n := s.Stats().Accepted; n != 0 {
				t.Errorf("%d connections were made", n)
			}
		})
	}
	for _, text := range []string{
		",", "a:1", "[::1]:80", "10.0.0.0/33", "10.0.0.1/8", "1.2.3", "http://a", "a b", "*.example.com",
		"fe80::1%eth0", "::ffff:10.0.0.0/104", strings.Repeat("a,", 256) + "a",
	} {
		if a, err := allow.Parse(text); err == nil || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%q: %v, %v", text, a, err)
		}
	}
}
