// Package allow is which hosts an agent may connect to: those that its configuration names.
package allow

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
)

// ErrRefused is a host that is not allowed. Nothing was sent to it.
var ErrRefused = errors.New("not allowed")

// maxEntries bounds the entries of a Hosts.
const maxEntries = 256

// Hosts is which hosts may be connected to. The zero value is any host.
type Hosts struct {
	names []string
	nets  []netip.Prefix
}

// Parse reads names of hosts, addresses and networks, separated by commas, such as
// "prefill-0.prefill,10.1.0.0/16,fd00::7". A name is allowed as a request gives it, whatever its
// addresses are; a name that is not in the list is allowed at the addresses that are. Empty text is
// any host.
func Parse(text string) (h Hosts, err error) {
	if text == "" {
		return h, nil
	}
	entries := strings.Split(text, ",")
	if len(entries) > maxEntries {
		return h, fmt.Errorf("%d entries, allowed: at most %d", len(entries), maxEntries)
	}
	for _, entry := range entries {
		entry = strings.TrimSpace(entry)
		if ip, err := netip.ParseAddr(entry); err == nil && ip.Zone() == "" {
			ip = ip.Unmap()
			h.nets = append(h.nets, netip.PrefixFrom(ip, ip.BitLen()))
		} else if net, err := netip.ParsePrefix(entry); err == nil && net == net.Masked() && !net.Addr().Is4In6() {
			h.nets = append(h.nets, net)
		} else if isName(entry) {
			h.names = append(h.names, canonical(entry))
		} else {
			return Hosts{}, fmt.Errorf("%q, allowed: names of hosts, addresses and networks such as 10.1.0.0/16, "+
				"without ports, separated by commas", entry)
		}
	}
	return h, nil
}

// isName reports whether text can be the name of a host: it is no address, and has no port.
func isName(text string) bool {
	text = strings.TrimSuffix(text, ".")
	if text == "" || len(text) > 253 || strings.Trim(text, "0123456789.") == "" {
		return false
	}
	for label := range strings.SplitSeq(text, ".") {
		if label == "" || strings.Trim(strings.ToLower(label), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// Any reports whether every host is allowed.
func (h Hosts) Any() bool { return len(h.names) == 0 && len(h.nets) == 0 }

// String names the hosts.
func (h Hosts) String() string {
	if h.Any() {
		return "any host"
	}
	out := slices.Clone(h.names)
	for _, n := range h.nets {
		out = append(out, n.String())
	}
	return strings.Join(out, ", ")
}

func (h Hosts) refused(host string) error {
	return fmt.Errorf("%w: remote_host is %q, allowed: %v (--peer-allow)", ErrRefused, host, h)
}

// Check returns an error for an address whose host cannot be allowed. A name that is not in the
// list may still have an allowed address.
func (h Hosts) Check(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		host = addr
	}
	if h.Any() || slices.Contains(h.names, canonical(host)) {
		return nil
	}
	if ip, err := netip.ParseAddr(host); err == nil && !h.has(ip) || err != nil && len(h.nets) == 0 {
		return h.refused(host)
	}
	return nil
}

func (h Hosts) has(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	return slices.ContainsFunc(h.nets, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// Dial connects to an address that is allowed. What a name means is decided where the connection is
// made, so that it cannot mean something else there.
func (h Hosts) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if err := h.Check(addr); err != nil {
		return nil, err
	}
	d := net.Dialer{}
	if host, _, err := net.SplitHostPort(addr); !h.Any() && err == nil && !slices.Contains(h.names, canonical(host)) {
		d.ControlContext = func(_ context.Context, _, at string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(at)
			if err != nil || !h.has(to.Addr()) {
				return h.refused(fmt.Sprintf("%s (%s)", host, at))
			}
			return nil
		}
	}
	return d.DialContext(ctx, "tcp", addr)
}
