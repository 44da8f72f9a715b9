package tierspec

import (
	"net/url"
	"strings"
	"time"

	"github.com/kvagent/kvagent/pool/s3"
)

// readS3Tier reads s3://BUCKET[/PREFIX]. Without keys those of the environment, the AWS file or the machine's role sign.
func readS3Tier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := s3.Options{
		Bucket: u.Host, Endpoint: o.text("endpoint", ""), Region: o.text("region", ""),
		Insecure:    o.choice("tls", "on", "on", "off") == "off",
		PathStyle:   o.choice("path-style", "off", "on", "off") == "on",
		Concurrency: o.count("concurrency", 1024),
		RangeBytes:  int(o.size("range", s3.MinRangeBytes, s3.MaxRangeBytes)),
		DialTimeout: o.duration("dial-timeout", 10*time.Millisecond, time.Minute),
	}
	if prefix := strings.Trim(u.Path, "/"); prefix != "" {
		r.Prefix = prefix + "/"
	}
	var err error
	r.AccessKey, err = o.secret("access-key")
	o.fail(err)
	r.SecretKey, err = o.secret("secret-key")
	o.fail(err)
	r.SessionToken, err = o.secret("session-token")
	o.fail(err)
	if ca := o.text("tls-ca-file", ""); ca != "" {
		r.TLS, err = tlsConfig(ca, "")
		o.fail(err)
	}
	return func(n *Needs) (Opened, error) {
		r.OnState = n.told("s3")
		s, err := s3.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}
