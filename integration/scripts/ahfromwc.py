"""A datagram, and its answer along an address handle that libibverbs makes of the
completion and of the 40 bytes in front of the payload (ibv_create_ah_from_wc).

usage: ahfromwc.py DEVICE GID_INDEX
"""
import sys
import time

import pyverbs.device as d
import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import RecvWR, SGE, SendWR

GRH_SIZE, QKEY, ROOM = 40, 0x1111, 200


class End:
    def __init__(self, name):
        self.ctx = d.Context(name=name)
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 16)
        self.mr = MR(self.pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=4, max_recv_wr=4)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=cap))
        attr = QPAttr(port_num=1)
        attr.qkey = QKEY
        self.qp.to_rts(attr)
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, ROOM, self.mr.lkey)]))

    def send(self, ah, qpn, text):
        self.mr.write(text, len(text), 1000)
        wr = SendWR(num_sge=1, sg=[SGE(self.mr.buf + 1000, len(text), self.mr.lkey)],
                    opcode=e.IBV_WR_SEND, send_flags=e.IBV_SEND_SIGNALED)
        wr.set_wr_ud(ah, qpn, QKEY)
        self.qp.post_send(wr)

    def receive(self, text):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for wc in self.cq.poll(1)[1]:
                assert wc.status == e.IBV_WC_SUCCESS, wc
                if wc.opcode & e.IBV_WC_RECV:
                    got = self.mr.read(wc.byte_len - GRH_SIZE, GRH_SIZE)
                    assert got == text.encode(), got
                    return wc
        raise TimeoutError(text)


def main(name, index):
    a, b = End(name), End(name)
    route = GlobalRoute(dgid=b.ctx.query_gid(1, index), sgid_index=index, hop_limit=1, traffic_class=0x20)
    lid = b.ctx.query_port(1).lid
    ah = AH(a.pd, attr=AHAttr(dlid=lid, is_global=1, port_num=1, gr=route))
    a.send(ah, b.qp.qp_num, 'there')
    wc = b.receive('there')
    assert wc.wc_flags & e.IBV_WC_GRH, wc
    h = b.mr.read(GRH_SIZE, 0)
    back = AH(b.pd, wc=wc, grh=b.mr.buf, port_num=1)
    b.send(back, wc.src_qp, 'and back')
    a.receive('and back')
    print('there and back by GID', index, h.hex())


main(sys.argv[1], int(sys.argv[2]))
