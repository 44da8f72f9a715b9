package peering

import (
	"net"
	"os"
	"testing"
)

// Other agents are told the configured address, else the one at which the agent listens, with the
// host's name if that is every address.
func TestPeerAddress(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	at := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 7460} }
	for _, c := range []struct {
		advertise string
		listens   net.Addr
		want      string
	}{
		{"", at("10.0.0.7"), "10.0.0.7:7460"}, {"", at("0.0.0.0"), host + ":7460"}, {"", at("::"), host + ":7460"},
		{"node-1:99", at("0.0.0.0"), "node-1:99"}, {"", at("fd00::1"), "[fd00::1]:7460"},
	} {
		if got := (&Settings{advertise: c.advertise}).address(c.listens); got != c.want {
			t.Errorf("listens at %v: tells %q, want %q", c.listens, got, c.want)
		}
	}
}
